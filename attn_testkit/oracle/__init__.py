"""The cache in front of the families: what a step should give, and how far rounding may lead from it."""
