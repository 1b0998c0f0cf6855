"""Diagnosis of a wrong result: the check that really fails, the KV tokens that were read, misrouted rows."""
