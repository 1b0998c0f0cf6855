"""Conformance tests for the attention backends of LLM servers.

``check_backend`` runs them from Python; ``attn-testkit`` and the pytest plugin are the other front ends. Authors of
backends import from ``attn_testkit.contract``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .running.check_backend import check_backend

__all__ = ["check_backend"]


def __getattr__(name: str) -> Any:
    """Import a front end only when it is asked for: pytest loads this package at every start."""
    if name == "check_backend":
        from .running.check_backend import check_backend

        return check_backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
