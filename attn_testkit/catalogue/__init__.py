"""Cases of each tier: covering arrays, cases made for one thing, small cases, the count of what is not covered."""
