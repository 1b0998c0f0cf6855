"""Operators for mistakes in attention backends: strides, dtypes, masks, copies, caches, layers.

They are used in addition to those of ``operators.py``, which are about Python in general.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from .operators import OPERATORS, Code, Edit, Operator

UNSEEN = frozenset({"num_warps", "num_stages", "non_blocking", "daemon", "maxsize", "repr", "strict"})
"""Keyword arguments that change only speed, or nothing that is visible in an output or a KV slot."""

_SAME_EITHER_WAY = frozenset(
    {
        "min",
        "max",
        "minimum",
        "maximum",
        "logaddexp",
        "isinstance",
        "logical_and",
        "logical_or",
        "zip",
        "set",
        "frozenset",
    }
)
"""Functions whose first two arguments may be swapped, or never can be in a program that runs."""
_DTYPES = {
    "int32": "int64", "int64": "int32", "float32": "float16", "bfloat16": "float16", "float16": "bfloat16",
    "long": "int", "int": "long", "float": "half",
}  # fmt: skip
_NEW_MEMORY = frozenset({"clone", "contiguous", "copy"})
_KEEPS_ITS_SHAPE = frozenset({"clamp", "clamp_min", "clamp_max", "masked_fill", "nan_to_num", "tril", "triu"})


def _swapped(first: ast.AST, second: ast.AST, code: Code) -> Edit:
    start, end = code.start(first), code.end(second)
    between = code.source[code.end(first) : code.start(second)].decode()
    return Edit(start, end, f"{code.text(second)}{between}{code.text(first)}")


def _arguments(node: ast.AST, code: Code) -> Iterator[Edit]:
    """Swap two adjacent indices, strides or pointers."""
    values: list[ast.expr] = []
    if isinstance(node, ast.Call) and _called(node) not in _SAME_EITHER_WAY:
        values = node.args
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        values = node.slice.elts
    for first, second in pairwise(values):
        if not isinstance(first, ast.Starred | ast.Constant | ast.Slice) and not isinstance(second, ast.Starred):
            yield _swapped(first, second, code)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _dtype(node: ast.AST, code: Code) -> Iterator[Edit]:
    """``torch.int32`` for ``torch.int64``, ``.int()`` for ``.long()``, half the width of a float."""
    if not isinstance(node, ast.Attribute) or node.attr not in _DTYPES:
        return
    of_module = isinstance(node.value, ast.Name) and node.value.id in ("torch", "tl")
    if of_module == (node.attr not in ("long", "int", "float", "half")):
        yield Edit(code.end(node) - len(node.attr), code.end(node), _DTYPES[node.attr])


def _load(node: ast.AST, code: Code) -> Iterator[Edit]:
    """``tl.load`` without its mask, and so without the value for masked elements."""
    if isinstance(node, ast.Call) and _called(node) == "load" and any(k.arg == "mask" for k in node.keywords):
        kept = [code.text(each) for each in (*node.args, *(k for k in node.keywords if k.arg not in ("mask", "other")))]
        yield code.replace(node, f"{code.text(node.func)}({', '.join(kept)})")


def _in_place(node: ast.AST, code: Code) -> Iterator[Edit]:
    """``x = y`` for ``x.copy_(y)``: a graph still reads the first tensor."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called, given = node.value.func, node.value.args
        copies = isinstance(called, ast.Attribute) and called.attr == "copy_" and len(given) == 1
        if isinstance(called, ast.Attribute) and copies and isinstance(called.value, ast.Name | ast.Attribute):
            yield code.replace(node, f"{code.text(called.value)} = {code.text(given[0])}")
    for value in ast.iter_child_nodes(node) if not isinstance(node, ast.Expr) else ():
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            name = value.func.attr
            if name in ("zero_", "fill_", "copy_") or name in _NEW_MEMORY | _KEEPS_ITS_SHAPE:
                yield code.replace(value, code.text(value.func.value))


def _order(node: ast.AST, code: Code) -> Iterator[Edit]:
    """Swap two consecutive calls, such as copies."""
    for name in ("body", "orelse"):
        body = getattr(node, name, None)
        if not isinstance(body, list):
            continue
        for first, second in pairwise(body):
            if all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) for each in (first, second)):
                yield _swapped(first, second, code)


def _layer(node: ast.AST, code: Code) -> Iterator[Edit]:
    """Use the first layer, or the first KV group, for all."""
    if isinstance(node, ast.Attribute) and node.attr == "layer_id" and isinstance(node.ctx, ast.Load):
        yield code.replace(node, "0")
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "group_of":
        yield code.replace(node, f"{code.text(node.func.value)}.groups[0]")


def _guard(node: ast.AST, code: Code) -> Iterator[Edit]:
    """``if self._cached is None`` always, or never."""
    if isinstance(node, ast.If | ast.IfExp):
        yield code.replace(node.test, "True")
        yield code.replace(node.test, "False")


SPECIALS: dict[str, Operator] = {
    "arguments": _arguments,
    "dtype": _dtype,
    "load": _load,
    "in-place": _in_place,
    "order": _order,
    "layer": _layer,
    "guard": _guard,
}
"""Name -> edits of one node. None if it does not apply."""
ALL: dict[str, Operator] = {**OPERATORS, **SPECIALS}


def is_capability(node: ast.AST) -> bool:
    """True for ``capabilities = ...``, which is not code of a backend: declaring less is not a mistake and only gives
    fewer cases."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == "capabilities" for target in targets)
