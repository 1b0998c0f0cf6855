"""``--version``: the kit's version, and the lines that other distributions add."""

from __future__ import annotations

import importlib.metadata as metadata

import attn_testkit

GROUP = "attn_testkit.version"
"""Entry-point group of functions without arguments that return further lines."""


def version_text() -> str:
    """The text that ``attn-testkit --version`` prints."""
    lines = [f"attn-testkit, version {attn_testkit.__version__}"]
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        lines += point.load()()
    return "\n".join(lines)
