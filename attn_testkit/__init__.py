"""Conformance tests for the attention backends of LLM servers."""
