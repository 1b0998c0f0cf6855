"""Cases of each tier: covering arrays, cases for one purpose each, small cases, and the list of values that are not
covered."""
