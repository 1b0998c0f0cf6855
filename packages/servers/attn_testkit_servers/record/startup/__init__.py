"""Folder for PYTHONPATH: its ``sitecustomize`` records a server from its first import on."""
