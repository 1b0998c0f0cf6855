"""Attention backends of LLM servers, unchanged, behind the kit's contract: ``--backend sglang:triton``.

A bridge is a package with ``backend_class(name)``, which ``registry.BRIDGES`` names. It stands in for the server around
a backend class, and translates what the kit says to what that server says. Importing a bridge imports no server.
"""
