"""Watches of memory that outlives a step: what it held before, which bits changed, and copies of only those."""
