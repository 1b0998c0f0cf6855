"""Watches of memory that outlives a step: its earlier contents, the bits that changed, and copies of only those."""
