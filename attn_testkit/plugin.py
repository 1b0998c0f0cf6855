"""The pytest plugin: ``pytest --pyargs attn_testkit.suite --attn-backend=SPEC``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Name the group that the options live in."""
    parser.getgroup("attn", "attention backend conformance (attn-testkit)")
