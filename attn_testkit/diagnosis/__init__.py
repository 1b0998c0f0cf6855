"""After a wrong result: which check it really fails, which KV tokens were read, whose result it is."""
