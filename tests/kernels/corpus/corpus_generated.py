"""Arguments for a kernel from its own source, for kernels that no call of a package's function launches here.

What a parameter is, is read from the syntax tree: an address that is loaded from or stored to, whole numbers or floats
behind it, a flag, a number. Buffers are large and pointers point into their middle, strides and lengths are small, so
that what a kernel reads with such arguments is its own memory. The numbers mean nothing; every branch that they reach
must still leave the same bits in both interpreters.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any

import torch

_ACCESS = {"load", "store", "make_block_ptr", "make_tensor_descriptor", "advance"}
_ROOM = 1 << 15
_FLAG = re.compile(
    r"^(IS|USE|HAS|STORE|SAVE|LOAD|APPLY|WITH|ENABLE|DO|NEED|OUTPUT|SKIP|WRITE|READ|CAUSAL|ALLOW|SAFE|REVERSE|FUSE|COMPUTE|INPLACE|TRANSPOSE|[A-Z]+_FIRST)(_|$)|^(is|use|has|with|do)_|_FLAG$"
)


@dataclasses.dataclass
class Facts:
    """What the source of a function says of its names: addresses, whole numbers behind them, flags, compared texts."""

    addresses: set[str]
    whole: set[str]
    flags: set[str]
    texts: dict[str, list[Any]]
    types: set[str]
    maybe_none: set[str]


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _bases(node: ast.AST) -> list[str]:
    """Names that are added up to an address: those in front of an offset first."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return _bases(node.left) + _bases(node.right)
    if isinstance(node, ast.IfExp):
        return _bases(node.body) + _bases(node.orelse)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("to", "cast", "multiple_of", "advance")
    ):
        inner = node.func.value
        return _bases(node.args[0]) if isinstance(inner, ast.Name) and inner.id == "tl" and node.args else _bases(inner)
    return []


def facts(function: Any, interpreted: type, strict: bool = False, depth: int = 0) -> Facts:
    """Facts of a kernel's Python function, and through the jit functions that it calls.

    `strict`: of a sum the first term alone is an address.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    found = Facts(set(), set(), set(), {}, set(), set())
    assigned: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and isinstance(node.target, ast.Name) and node.value:
            assigned.setdefault(node.target.id, []).append(node.value)
    reached: set[str] = set()
    todo: list[str] = []
    indices: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _of_call(node, function, interpreted, (strict, depth), found, todo, indices)
        elif isinstance(node, (ast.If, ast.IfExp)):
            tests = [node.test, *(node.test.values if isinstance(node.test, ast.BoolOp) else [])]
            for test in tests:
                test = test.operand if isinstance(test, ast.UnaryOp) else test
                if isinstance(test, ast.Name):
                    found.flags.add(test.id)
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
            for right in node.comparators:
                if isinstance(right, ast.Constant) and right.value is None:
                    found.maybe_none.add(node.left.id)
                elif (
                    isinstance(right, ast.Constant)
                    and isinstance(right.value, (str, int))
                    and len(node.ops) == 1
                    and isinstance(node.ops[0], ast.Eq)
                ):
                    found.texts.setdefault(node.left.id, []).append(right.value)
    while todo:
        name = todo.pop()
        if name in reached:
            continue
        reached.add(name)
        for value in assigned.get(name, []):
            todo += _bases(value)[: 1 if strict else None]
            indices |= {word for word in _names(value) if word not in _bases(value)[:1]}
    found.addresses |= reached
    # Whatever a loaded number is used for as an index or as the end of a loop makes its memory whole numbers.
    done: set[str] = set()
    pending = list(indices)
    while pending:
        name = pending.pop()
        if name in done:
            continue
        done.add(name)
        for value in assigned.get(name, []):
            pending += [word for word in _names(value) if word not in ("tl", "triton")]
            for call in ast.walk(value):
                if (
                    isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Attribute)
                    and call.func.attr == "load"
                    and call.args
                ):
                    found.whole |= _roots(call.args[0], assigned)
    return found


def _roots(node: ast.AST, assigned: dict[str, list[ast.AST]]) -> set[str]:
    seen: set[str] = set()
    todo = _bases(node)[:1]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            for value in assigned.get(name, []):
                todo += _bases(value)[:1]
    return seen


def _of_call(
    node: ast.Call,
    function: Any,
    interpreted: type,
    how: tuple[bool, int],
    found: Facts,
    todo: list[str],
    indices: set[str],
) -> None:
    called = node.func
    if isinstance(called, ast.Attribute):
        if (called.attr in _ACCESS or called.attr.startswith("atomic_")) and node.args:
            bases = _bases(node.args[0])
            todo += bases[: 1 if how[0] else None]
            indices |= _names(node.args[0]) - set(bases[:1])
        elif called.attr == "range":
            for argument in node.args:
                indices |= _names(argument)
        elif called.attr == "to":
            found.types |= {a.id for a in node.args if isinstance(a, ast.Name)}
        for keyword in node.keywords:
            if keyword.arg in ("dtype", "out_dtype") and isinstance(keyword.value, ast.Name):
                found.types.add(keyword.value.id)
    elif isinstance(called, ast.Name):
        if called.id == "range":
            for argument in node.args:
                indices |= _names(argument)
        helper = function.__globals__.get(called.id)
        if isinstance(helper, interpreted) and how[1] < 4 and helper.fn is not function:
            inner = facts(helper.fn, interpreted, how[0], how[1] + 1)
            parameters = list(inspect.signature(helper.fn).parameters)
            pairs = [*zip(parameters, node.args, strict=False), *((k.arg, k.value) for k in node.keywords if k.arg)]
            for parameter, value in pairs:
                names = _bases(value)[: 1 if how[0] else None]
                if parameter in inner.addresses:
                    todo += names
                if parameter in inner.whole:
                    found.whole |= set(names)
                if isinstance(value, ast.Name):
                    if parameter in inner.flags:
                        found.flags.add(value.id)
                    if parameter in inner.types:
                        found.types.add(value.id)
                    if parameter in inner.texts:
                        found.texts.setdefault(value.id, []).extend(inner.texts[parameter])


def arguments(function: Any, interpreted: type, variant: int) -> dict[str, Any]:
    """Arguments by name. Variants differ in flags, block sizes, and in what is guessed of memory."""
    import triton.language as tl

    told = facts(function, interpreted, strict := variant >= 4)
    torch.manual_seed(variant)
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        constant = "constexpr" in str(parameter.annotation)
        lower = name.lower()
        if (
            not constant
            and name in told.addresses
            and not re.search("stride" if strict else r"stride|^num_|^n_|_size$|_len$", lower)
        ):
            given[name] = _memory(name, lower, name in told.whole, variant)
        elif constant and name in told.texts and isinstance(told.texts[name][0], str):
            texts = told.texts[name]
            given[name] = texts[variant % len(texts)]
        elif constant and (name in told.types or re.search(r"dtype|_type$|_ty$", lower)):
            given[name] = tl.float32
        elif name in told.flags or (constant and (_FLAG.search(name) or isinstance(parameter.default, bool))):
            given[name] = variant % 2 == 0
        elif constant and name in told.texts:
            texts = told.texts[name]
            given[name] = texts[variant % len(texts)]
        elif parameter.default is not inspect.Parameter.empty and parameter.default is not None and constant:
            given[name] = parameter.default
        elif constant and re.search(r"precision", lower):
            given[name] = "ieee"
        elif re.search(
            r"^(h|hq|hv|hk|g|nh)$|heads?$|num_head|n_head|group|split|^b$|ratio|num_stages|num_warps|steps|layers|world|rank|^num_|^n_",
            lower,
        ):
            given[name] = 2 if variant < 2 else 1
        elif re.search(r"stride", lower):
            given[name] = 1 if re.search(r"(_d|_k|_dim|_last|d|_n)$", lower) else 16
        elif not constant and re.search(
            r"scale|eps|cap|temperature|alpha|beta|theta|bound|threshold|limit|decay|slope|momentum|factor", lower
        ):
            given[name] = 0.5
        elif re.search(r"window", lower):
            given[name] = 8
        elif not constant and re.search(r"pad|null|skip|invalid|sentinel", lower):
            given[name] = -1
        elif constant and re.search(r"min|start|offset|pid|axis|index", lower):
            given[name] = 0
        else:
            given[name] = 16 if constant or variant % 2 else 12
    return given


def _memory(name: str, lower: str, whole: bool, variant: int) -> Any:
    size = 2 * _ROOM
    if whole != (variant == 3 and not re.search(r"ptr_|data_ptr", lower)):
        kind = torch.int64 if re.search(r"loc|slot|64", lower) else torch.int32
        if re.search(r"cu_|indptr|start|cumul|offs", lower):
            numbers = (torch.arange(size, dtype=torch.int64) - _ROOM).clamp(0, 8) * 6
        elif re.search(r"len|num|count", lower):
            numbers = torch.randint(5, 14, (size,))
        else:
            numbers = torch.randint(0, 4, (size,))
        memory = numbers.to(kind)
    elif re.search(r"mask|flag|bool|^has_|is_", lower):
        memory = torch.randint(0, 2, (size,)).bool()
    else:
        memory = torch.randn(size).mul_(0.5).to(torch.float32 if variant == 1 else torch.float16)
        if re.search(r"lse|cumsum|^g$|gk|decay|a_log|acc|state|^m$|^l$", lower) or variant == 1:
            memory = memory.float()
    return memory.cuda()[_ROOM:]


def grid(function: Any) -> tuple[int, int, int]:
    """Two programs in each dimension that the kernel, or what it calls, asks for."""
    source = inspect.getsource(function)
    sizes = [2 if re.search(rf"program_id\((axis=)?{axis}\)", source) else 1 for axis in range(3)]
    return sizes[0], sizes[1], sizes[2]
