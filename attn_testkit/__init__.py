"""Conformance tests for the attention backends of LLM servers.

``check_backend`` is the door for Python; ``attn-testkit`` and the pytest plugin are the others. Backend authors import
from ``attn_testkit.contract``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .running.plan import check_backend

__all__ = ["check_backend"]


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, only when it is asked for: pytest loads this package at every start."""
    if name == "check_backend":
        from .running.plan import check_backend

        return check_backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
