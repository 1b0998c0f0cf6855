"""A failing case made small: it differs from the plain case of its mode in few features, and has small values."""
