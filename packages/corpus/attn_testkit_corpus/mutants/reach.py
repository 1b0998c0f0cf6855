"""Case-runs that execute the changed code of a mutant; no other case-run can distinguish it from the original."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from attn_testkit.running.planning.code_units import LEAVES_THE_BODY_AS_IT_IS, kept_names, last_name

from .operators import Code, Edit

Lines = Mapping[str, frozenset[int]]
"""Module -> line numbers that ran."""


@dataclass(frozen=True)
class Spot:
    """The statement that a mutant changes, or the head of a compound statement."""

    first: int
    last: int
    scattered: bool = False
    """True if the lines are a whole function that Python does not run, or that is rewritten first (Triton)."""
    kept: bool = False
    """True if the function's result may be kept for the process: case-runs that never enter it use it."""


def spot_of(source: bytes, edit: Edit) -> Spot:
    """Place of an edit."""
    code, kept_names = _read(source)
    held: ast.AST = code.tree
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    rewritten = kept = False
    while True:
        inner = next((s for s in _statements(held) if _start(s, code) <= edit.start < code.end(s)), None)
        if inner is None:
            break
        if isinstance(held, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {last_name(each) for each in held.decorator_list} - LEAVES_THE_BODY_AS_IT_IS
            function = held if names and not rewritten else function
            rewritten = rewritten or bool(names)
            loaded = {n.id for n in ast.walk(held) if isinstance(n, ast.Name)}
            kept = kept or bool(names - {"jit"}) or bool(loaded & kept_names)
        held = inner
    if rewritten and function is not None:
        return Spot(function.lineno, function.end_lineno or function.lineno, True, kept)
    first, last = _head(held)
    return Spot(first, last, False, kept)


@functools.lru_cache(maxsize=16)
def _read(source: bytes) -> tuple[Code, frozenset[str]]:
    code = Code(source)
    return code, kept_names(code.tree)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements directly inside a node, including those of ``except`` and ``case``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements(child)


def _start(node: ast.stmt, code: Code) -> int:
    return min(code.start(each) for each in (node, *getattr(node, "decorator_list", ())))


def _head(node: ast.AST) -> tuple[int, int]:
    """First and last line of a statement, without the statements that it holds."""
    if not isinstance(node, ast.stmt):
        return 1, 1  # of the module: as everything at its top, it runs where it is imported
    first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
    inside = [_head(each)[0] for each in _statements(node)]
    return first, max(first, min(inside) - 1) if inside else node.end_lineno or first


def reaches(spot: Spot, module: str, imported: Lines, runs: Mapping[str, Lines]) -> set[str]:
    """The case-runs that a mutant at this spot could be seen in.

    Args:
        spot: where it is.
        module: in which module.
        imported: lines that ran at the import, and so count for every case-run.
        runs: case-run -> its lines.

    """
    wanted = frozenset(range(spot.first, spot.last + 1))
    if not spot.scattered and wanted & imported.get(module, frozenset()):
        return set(runs)
    found = {name for name, lines in runs.items() if wanted & lines.get(module, frozenset())}
    # Nothing is known of a function that never ran as Python.
    everywhere = bool(found) if spot.kept else not found and spot.scattered
    return set(runs) if everywhere else found
