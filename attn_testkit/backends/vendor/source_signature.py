"""Signatures of functions in modules that do not import here: read from the source without running it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any


def stub_of(path: str) -> Callable[..., Any]:
    """A function with the name and the signature of ``module:function``, which raises if it is called.

    Raises ``ImportError`` without the package, ``AttributeError`` if the module has no such function.
    """
    module, _, name = path.partition(":")
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"No module named {package!r}")
    file = Path(spec.submodule_search_locations[0], *rest).with_suffix(".py")
    body = ast.parse(file.read_text()).body if file.exists() else []
    found = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    if found is None:
        raise AttributeError(f"{file.name} has no function {name}")

    def stub(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{path} was read from its source only")

    stub.__name__ = stub.__qualname__ = name
    stub.__dict__["__signature__"] = _signature(found.args)
    return stub


def _signature(given: ast.arguments) -> inspect.Signature:
    """Names, kinds and defaults, which must be literals."""
    kind, named = inspect.Parameter, [*given.posonlyargs, *given.args]
    first = len(named) - len(given.defaults)
    found = [
        kind(
            each.arg, kind.POSITIONAL_OR_KEYWORD, default=_default(given.defaults[at - first] if at >= first else None)
        )
        for at, each in enumerate(named)
    ]
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    found += [kind(each.arg, kind.KEYWORD_ONLY, default=_default(value)) for each, value in keywords]
    return inspect.Signature(found)


def _default(value: ast.expr | None) -> Any:
    return inspect.Parameter.empty if value is None else ast.literal_eval(value)
