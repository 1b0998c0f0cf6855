"""The one backend in a file that a command names, as in ``attn-testkit run adapter.py``."""

from __future__ import annotations

import ast
from pathlib import Path

from ..registry import UsageError


def spec_of(name: str) -> str:
    """``module:Class`` of the only backend in a file ``name``; any other name unchanged. The file is not imported.

    Raises ``UsageError`` if the file cannot be read, has no backend, or has several.
    """
    if not name.endswith(".py") or ":" in name:
        return name
    path = Path(name)
    try:
        tree = ast.parse(path.read_text("utf-8"), name)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{name} is not Python: {error}") from error
    parts = path.with_suffix("").parts
    if path.is_absolute() or ".." in parts:
        raise UsageError(
            f"{name} is outside of this folder, from which modules are imported; change to its folder first"
        )
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = [node.name for node in classes if _is_backend(node)]
    module = ".".join(parts)
    if not found:
        last = classes[-1].name if classes else "Class"
        raise UsageError(
            f"{name} has no class that sets `capabilities`; set them, or name a class that inherits them: "
            f"--backend {module}:{last}"
        )
    if len(found) > 1:
        raise UsageError(
            f"{name} has {len(found)} backends; name one: --backend {module}:{found[0]} ({', '.join(found)})"
        )
    return f"{module}:{found[0]}"


def _is_backend(node: ast.ClassDef) -> bool:
    """True for a class that declares capabilities."""
    targets = [
        target
        for each in node.body
        if isinstance(each, ast.Assign | ast.AnnAssign)
        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
    ]
    return any(isinstance(target, ast.Name) and target.id == "capabilities" for target in targets)
