"""Attention backends of LLM servers, unchanged, behind the kit's contract: ``--backend sglang:triton``.

A bridge is a package with ``backend_class(name)``, which the entry-point group ``attn_testkit.bridges`` names. It
replaces the server around a backend class, and translates the kit's calls into the server's. Importing a bridge imports
no server.
"""
