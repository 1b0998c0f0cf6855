"""Layers with a recurrent state: the float64 loop over tokens, its limits, exact data, and the memory of states.

``family.RECURRENT`` is the family.
"""
