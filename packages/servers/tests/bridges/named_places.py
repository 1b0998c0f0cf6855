"""Looks a place of a server's source up: ``file.py:Class.method``."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path


def missing_in(root: Path, places: Iterable[str]) -> list[str]:
    """The places that the source under ``root`` does not have."""
    return sorted({place for place in places if not _has(root, place)})


def _has(root: Path, place: str) -> bool:
    file, _, path = place.partition(":")
    if not (root / file).is_file():
        return False
    found: ast.AST = ast.parse((root / file).read_text())
    for part in path.split("."):
        inside = [node for node in ast.iter_child_nodes(found) if getattr(node, "name", "") == part]
        if not inside:
            return False
        found = inside[0]
    return True
