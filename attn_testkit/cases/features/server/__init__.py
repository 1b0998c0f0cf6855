"""Server variants, one file each: the backends that support it, its cases, and its changes to their steps."""
