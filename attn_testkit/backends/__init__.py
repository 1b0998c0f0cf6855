"""Bundled backends. Each imports only the contract and its own kernels, as a backend in another repository would."""
