"""The parts of a Python file that can change by themselves: functions, and statements that bind names."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef

LEAVES_THE_BODY_AS_IT_IS = frozenset(
    {"property", "setter", "cached_property", "staticmethod", "classmethod", "abstractmethod", "contextmanager",
     "override", "dataclass", "no_grad", "inference_mode"}
)  # fmt: skip
"""Decorators under which Python runs the function's own code."""
REST = "<module>"
"""Name of the unit of all other statements of a module."""


@dataclass(frozen=True)
class Unit:
    """One part of a file."""

    name: str
    """Qualified name of a function or method; the bound name of an import or an assignment; the name of a class, for
    everything in its body that is not a method; ``REST``."""
    digest: str
    """Digest of its syntax tree, without comments and docstrings."""
    mentions: frozenset[str]
    """Names, attributes and strings that are words, in its text."""
    kind: str
    """``function``, ``binding`` or ``body``. A body is code of a module or class that runs at the import."""
    opaque: bool = False
    """True if a case-run may depend on the function without running it as Python: it is compiled from its source, or
    its result is kept for the process."""

    @property
    def called(self) -> str:
        """The name by which other code refers to it."""
        owner, _, last = self.name.rpartition(".")
        return owner.rpartition(".")[2] if last in ("__init__", "__new__") else last


def units_of(source: str | bytes) -> dict[str, Unit]:
    """Name -> unit, of a file's text. Raises ``SyntaxError`` or ``ValueError`` if it is not Python."""
    tree = ast.parse(source)
    kept = kept_names(tree)
    parts: dict[str, list[tuple[str, ast.AST]]] = {}
    for name, kind, node in _parts(tree.body, "", REST):
        parts.setdefault(name, []).append((kind, node))
    return {name: _unit(name, found, kept) for name, found in parts.items()}


def _unit(name: str, found: list[tuple[str, ast.AST]], kept: frozenset[str]) -> Unit:
    kinds = {kind for kind, _ in found}
    kind = kinds.pop() if len(kinds) == 1 else "body"
    digest = hashlib.sha256("\n".join(ast.dump(node) for _, node in found).encode(errors="backslashreplace"))
    mentions = frozenset(word for _, node in found for word in _words(node))
    functions = [node for _, node in found if isinstance(node, Function)]
    rewritten = any({last_name(each) for each in node.decorator_list} - LEAVES_THE_BODY_AS_IT_IS for node in functions)
    return Unit(name, digest.hexdigest()[:16], mentions, kind, bool(functions) and (rewritten or bool(mentions & kept)))


def _parts(body: Iterable[ast.stmt], prefix: str, rest: str) -> Iterator[tuple[str, str, ast.AST]]:
    """(name, kind, tree) of the parts of a module or class. ``rest``: name of the unit of other statements."""
    for node in body:
        if isinstance(node, Function):
            _drop_docstring(node)
            yield prefix + node.name, "function", node
        elif isinstance(node, ast.ClassDef):
            name = prefix + node.name
            _drop_docstring(node)
            yield from _parts(node.body, f"{name}.", name)
            node.body = []
            yield name, "body", node
        elif isinstance(node, ast.Import | ast.ImportFrom) and not prefix:
            for alias in node.names:
                one: ast.stmt = ast.Import([alias])
                if isinstance(node, ast.ImportFrom):
                    one = ast.ImportFrom(node.module, [alias], node.level)
                yield _bound_by(alias), "binding", one
        elif not _is_main(node):
            yield from _parts(_functions_inside(node), prefix, rest)
            names = None if prefix else _bound(node)
            if names is None:
                yield rest, "body", node
            for each in names or ():
                yield each, "binding", node


class _Without(ast.NodeTransformer):
    """Removes functions and classes from a compound statement, and keeps them in a list."""

    def __init__(self) -> None:
        self.found: list[ast.stmt] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, Function | ast.ClassDef):
            self.found.append(node)
            return ast.Pass()
        return self.generic_visit(node)


def _functions_inside(node: ast.stmt) -> list[ast.stmt]:
    without = _Without()
    without.visit(node)
    return without.found


def _drop_docstring(node: Function | ast.ClassDef) -> None:
    for each in ast.walk(node):
        if isinstance(each, Function | ast.ClassDef) and ast.get_docstring(each, clean=False) is not None:
            each.body = each.body[1:] or [ast.Pass()]


def _bound(node: ast.stmt) -> list[str] | None:
    """Names that a statement binds; None if it may do something else."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [*map(_bound_by, node.names)]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [each.id for each in targets if isinstance(each, ast.Name)]
        return names if len(names) == len(targets) else None
    if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return []
    if isinstance(node, ast.If | ast.Try):
        handlers = [each for handler in getattr(node, "handlers", ()) for each in handler.body]
        inside = [*map(_bound, (*node.body, *handlers, *node.orelse, *getattr(node, "finalbody", ())))]
        return None if None in inside else [name for names in inside for name in names or ()]
    return None


def _bound_by(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]


def _is_main(node: ast.stmt) -> bool:
    """True for ``if __name__ == "__main__"``, which an import passes over."""
    return isinstance(node, ast.If) and "__main__" in _words(node.test)


def _words(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.alias):
            yield from each.name.split(".")
        elif isinstance(each, ast.ImportFrom) and each.module:
            yield from each.module.split(".")
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            words = each.value.split(".")
            yield from words if all(map(str.isidentifier, words)) else ()


def last_name(decorator: ast.expr) -> str:
    """``jit`` of ``@triton.jit`` and of ``@triton.jit(...)``."""
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


def kept_names(tree: ast.Module) -> frozenset[str]:
    """Variables of the module in which functions may keep something: empty containers, and names in ``global``."""
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        value = getattr(node, "value", None)
        empty = (isinstance(value, ast.Dict) and not value.keys) or (
            isinstance(value, ast.List | ast.Call) and not getattr(value, "elts", ()) and not getattr(value, "args", ())
        )
        if isinstance(node, ast.Assign | ast.AnnAssign) and empty:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)
