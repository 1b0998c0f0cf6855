"""Diagnosis of a wrong result: the check that it really fails, KV tokens that were read, misrouted rows."""
