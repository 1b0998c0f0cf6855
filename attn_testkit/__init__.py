"""Conformance tests for the attention backends of LLM servers.

``check_backend`` runs them from Python, ``assert_conformant`` raises if a backend does not conform, and
``conformance_cases`` makes a pytest test of each case-run. ``attn-testkit`` and the pytest plugin are the other front
ends. Authors of backends import from ``attn_testkit.contract``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plugin.own_tests import conformance_cases
    from .reports.outcome import NotConformant, Results
    from .running.check_backend import assert_conformant, check_backend

__all__ = ["NotConformant", "Results", "__version__", "assert_conformant", "check_backend", "conformance_cases"]

__version__ = Path(__file__).with_name("VERSION").read_text("utf-8").strip()
"""The version, which each pyproject.toml reads from the same file."""

_HOMES = {
    "NotConformant": ".reports.outcome",
    "Results": ".reports.outcome",
    "assert_conformant": ".running.check_backend",
    "check_backend": ".running.check_backend",
    "conformance_cases": ".plugin.own_tests",
}


def __getattr__(name: str) -> Any:
    """Import a front end on first use: pytest loads this package at every start."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOMES[name], __name__)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ImportError(
            f"{name} needs pytest, an extra of the kit: pip install 'PATH_OF_THE_CHECKOUT[pytest]'"
        ) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
