"""Submissions: the run of a profile as one archive, the referee that reads it, and the matrix of many of them."""
