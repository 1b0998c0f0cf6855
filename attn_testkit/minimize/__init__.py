"""A failing case made small: few features that are not as in the plain case of its mode, and small values of them."""
