"""Healthy controls of layers that differ."""

from __future__ import annotations

from .catalogue import control
from .grouped import GroupedBackend


@control("backend-per-kv-group")
class BackendPerKVGroup(GroupedBackend):
    """A backend for each KV group, as vLLM has a metadata builder for each."""
