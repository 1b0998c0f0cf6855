"""Sparse attention: softmax attention over the keys that an indexer selected for each row and layer (DSA)."""
