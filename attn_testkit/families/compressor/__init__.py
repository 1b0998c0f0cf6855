"""Layers that compress keys: one row for each group of tokens."""
