"""Server variants, a file for each: the backends that take it, its cases, and its changes of their steps."""
