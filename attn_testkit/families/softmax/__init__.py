"""Softmax attention in float64, computed limits, and the KV pool. ``family.SOFTMAX`` is the family."""
