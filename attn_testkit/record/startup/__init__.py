"""On PYTHONPATH: its ``sitecustomize`` has a server watched from its first import on."""
