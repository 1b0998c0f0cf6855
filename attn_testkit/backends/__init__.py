"""Backends that come along. Each imports the contract and its own kernels, as one in another repository would."""
