"""Small changes to a Python file, like a slip of a tired person or a bad merge.

An operator inspects one node of the syntax tree and yields edits of the source text, so that everything else in the
file, line numbers included, is unchanged. An edit whose result does not parse, or parses to the same tree, is dropped.
This file imports nothing of the kit: ``ci/mutants.py``, which mutates the kit, reads only this file.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """Replacement of bytes ``start:end`` of a file by ``text``."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Mutant:
    """One file with one edit."""

    path: str
    """Path relative to the root, with ``/``."""
    line: int
    scope: str
    """Class and function that hold the edit, dotted; empty at the top of a module."""
    operator: str
    was: str
    """The lines that the edit touches, without their indentation."""
    becomes: str
    edit: Edit
    number: int = 0
    """Number among mutants that agree in everything above but the line."""

    @property
    def id(self) -> str:
        """Id that stays the same as long as the lines and their scope do, even if they move in the file."""
        text = "\0".join((self.path, self.scope, self.was, self.becomes, str(self.number)))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def apply(self, source: bytes) -> bytes:
        """The mutated file."""
        return source[: self.edit.start] + self.edit.text.encode() + source[self.edit.end :]

    def diff(self, source: bytes) -> str:
        """Unified diff, with two lines of context."""
        before, after = (text.decode().splitlines() for text in (source, self.apply(source)))
        return "\n".join(difflib.unified_diff(before, after, self.path, self.path, lineterm="", n=2))


class Code:
    """A file's bytes and its tree, with places in bytes."""

    def __init__(self, source: bytes, unseen: Collection[str] = ()) -> None:
        self.source, self.unseen = source, unseen
        self.tree = ast.parse(source)
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        """Offset of a node's first byte."""
        return self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined, no-any-return]

    def end(self, node: ast.AST) -> int:
        """Offset after a node's last byte."""
        return self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined, no-any-return]

    def text(self, node: ast.AST) -> str:
        """Source text of a node."""
        return self.source[self.start(node) : self.end(node)].decode()

    def replace(self, node: ast.AST, text: str) -> Edit:
        """The edit that replaces a node."""
        return Edit(self.start(node), self.end(node), text)

    def between(self, left: ast.AST, right: ast.AST, spelled: str, text: str) -> Iterator[Edit]:
        """The edit of the operator between two nodes."""
        start = self.end(left)
        gap = re.sub(
            rb"#.*", lambda comment: b" " * len(comment.group()), self.source[start : self.start(right)]
        ).decode()
        found = re.search(r"\s+".join(re.escape(word) for word in spelled.split()), gap)
        if found:
            yield Edit(start + found.start(), start + found.end(), text)

    def lines(self, edit: Edit) -> tuple[int, str, str]:
        """Line number of an edit, and the lines it touches before and after, without indentation."""
        first = self.source.rfind(b"\n", 0, edit.start) + 1
        last = self.source.find(b"\n", edit.end)
        last = len(self.source) if last < 0 else last
        after = self.source[first : edit.start] + edit.text.encode() + self.source[edit.end : last]
        number = self.source.count(b"\n", 0, edit.start) + 1
        return number, _flat(self.source[first:last]), _flat(after)


def _flat(text: bytes) -> str:
    return "\n".join(line.strip() for line in text.decode().splitlines())


_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "&"),
}  # fmt: skip
_NAMES = {
    "min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin",
    "argmin": "argmax", "argmax": "argmin", "floor": "ceil", "ceil": "floor",
}  # fmt: skip


def _comparison(node: ast.AST, code: Code) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        for left, right, kind in zip([node.left, *node.comparators], node.comparators, node.ops, strict=False):
            yield from code.between(left, right, *_COMPARISONS[type(kind)])


def _arithmetic(node: ast.AST, code: Code) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield from code.between(node.left, node.right, *_ARITHMETIC[type(node.op)])
    elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield from code.between(node.target, node.value, *(f"{word}=" for word in _ARITHMETIC[type(node.op)]))


def _and_or(node: ast.AST, code: Code) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from code.between(left, right, *words)


def _negation(node: ast.AST, code: Code) -> Iterator[Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield code.replace(node, f"({code.text(node.operand)})")
    tests: list[ast.expr] = []
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    for test in tests:
        if not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):
            yield code.replace(test, f"(not ({code.text(test)}))")


def _constant(node: ast.AST, code: Code) -> Iterator[Edit]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield code.replace(node, str(not value))
    elif isinstance(value, int):
        yield code.replace(node, str(value + 1))
        if value > 0:
            yield code.replace(node, str(value - 1))
    elif isinstance(value, float) and math.isfinite(value):
        yield code.replace(node, repr(value * 2 or 1.0))
        if value:
            yield code.replace(node, repr(value / 2))


def _name(node: ast.AST, code: Code) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in _NAMES:
        yield code.replace(node.func, _NAMES[node.func.id])
    elif isinstance(node.func, ast.Attribute) and node.func.attr in _NAMES:
        end = code.end(node.func)
        yield Edit(end - len(node.func.attr), end, _NAMES[node.func.attr])


def _returned(node: ast.AST, code: Code) -> Iterator[Edit]:
    if isinstance(node, ast.Return) and node.value and not (
        isinstance(node.value, ast.Constant) and (node.value.value is None or isinstance(node.value.value, bool))
    ):  # fmt: skip
        yield code.replace(node.value, "None")


def _statement(node: ast.AST, code: Code) -> Iterator[Edit]:
    stored = isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    called = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    left = isinstance(node, ast.Return) and node.value is None
    if stored or called or left or isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Continue):
        yield code.replace(node, "pass")


def _element(node: ast.AST, code: Code) -> Iterator[Edit]:
    spans: list[tuple[int, int]] = []
    if isinstance(node, ast.List | ast.Set) or (isinstance(node, ast.Tuple) and len(node.elts) > 2):
        if isinstance(node, ast.Set) or isinstance(node.ctx, ast.Load):
            spans = [(code.start(e), code.end(e)) for e in node.elts]
    elif isinstance(node, ast.Dict):
        spans = [
            (code.start(k) if k else code.start(v) - 2, code.end(v))
            for k, v in zip(node.keys, node.values, strict=True)
        ]
    elif isinstance(node, ast.Call):
        keywords = [k for k in node.keywords if k.arg]
        values: Sequence[ast.AST] = [*node.args, *node.keywords]
        spans = [(code.start(v), code.end(v)) for v in values]
        first = len(spans) - len(keywords) if len(keywords) == len(node.keywords) else len(spans)
        seen = [index for index in range(first, len(spans)) if keywords[index - first].arg not in code.unseen]
        yield from (_without(spans, index) for index in seen)
        return
    yield from (_without(spans, index) for index in range(len(spans)))


def _without(spans: Sequence[tuple[int, int]], index: int) -> Edit:
    """The edit that removes one of several things between commas, and one comma with it."""
    start, end = spans[index]
    if index + 1 < len(spans):
        return Edit(start, spans[index + 1][0], "")
    return Edit(spans[index - 1][1] if index else start, end, "")


def _slice(node: ast.AST, code: Code) -> Iterator[Edit]:
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield code.replace(bound, "")
                if not isinstance(bound, ast.Constant):
                    yield code.replace(bound, f"({code.text(bound)}) + 1")


Operator = Callable[[ast.AST, Code], Iterator[Edit]]
OPERATORS: dict[str, Operator] = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "and-or": _and_or,
    "negation": _negation,
    "constant": _constant,
    "name": _name,
    "returned": _returned,
    "statement": _statement,
    "element": _element,
    "slice": _slice,
}
"""Name -> edits of one node. None if it does not apply."""


def mutants_of(
    source: bytes,
    path: str,
    unseen: Collection[str] = (),
    operators: Mapping[str, Operator] = OPERATORS,
    skip: Callable[[ast.AST], bool] = lambda node: False,
) -> list[Mutant]:
    """All mutants of a file, in its order. Raises ``SyntaxError`` when it is not Python.

    ``unseen``: keyword arguments that are not changed. ``skip``: nodes that are not changed, with everything inside.
    """
    code = Code(source, unseen)
    seen: set[Edit] = set()
    counts: Counter[tuple[str, str, str]] = Counter()
    found = []
    for holder, statement, inside in _parts(code.tree):
        start = code.start(statement)
        if decorators := getattr(statement, "decorator_list", ()):
            start = source.rindex(b"@", 0, min(map(code.start, decorators)))
        around = _Statement(start, code.end(statement), ast.dump(statement), statement.col_offset)
        for node, scope in _nodes(holder, inside, unseen, skip):
            for name, operator in operators.items():
                for edit in operator(node, code):
                    if edit in seen or not around.changed(source, edit):
                        continue
                    seen.add(edit)
                    line, was, becomes = code.lines(edit)
                    found.append(Mutant(path, line, scope, name, was, becomes, edit, counts[scope, was, becomes]))
                    counts[scope, was, becomes] += 1
    return sorted(found, key=lambda mutant: mutant.edit.start)


def _parts(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.stmt, str]]:
    """Statements at the top level of a module and of its classes, each as a record with the class around it."""
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and all(inner.lineno > statement.lineno for inner in statement.body):
            for inner in statement.body:
                yield ast.ClassDef(statement.name, [], [], [inner], []), inner, statement.name
        else:
            yield ast.Module([statement], []), statement, ""


class _Statement(NamedTuple):
    """A statement of a module or of a class: all that has to be parsed again for an edit inside it."""

    start: int
    end: int
    tree: str
    indent: int

    def changed(self, source: bytes, edit: Edit) -> bool:
        """True if the edited text is Python with another meaning."""
        text = source[self.start : edit.start] + edit.text.encode() + source[edit.end : self.end]
        if self.indent:
            text = b"if 1:\n" + b" " * self.indent + text
        try:
            (parsed, *more) = ast.parse(text).body
        except (SyntaxError, ValueError):
            return False
        statements = parsed.body if self.indent and isinstance(parsed, ast.If) else [parsed, *more]
        return [ast.dump(statement) for statement in statements] != [self.tree]


def _nodes(
    node: ast.AST, scope: str, unseen: Collection[str], skip: Callable[[ast.AST], bool]
) -> Iterator[tuple[ast.AST, str]]:
    """Every node that may be mutated, with the class and function that hold it."""
    for child in ast.iter_child_nodes(node):
        if _out_of_bounds(node, child) or (isinstance(child, ast.keyword) and child.arg in unseen) or skip(child):
            continue
        yield child, scope
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{child.name}".lstrip(".")
        yield from _nodes(child, inner, unseen, skip)


def _out_of_bounds(node: ast.AST, child: ast.AST) -> bool:
    """True for code without behavior: types, decorators, exports, asserts for the type checker, texts.

    Texts are left out because before Python 3.12 nodes inside an f-string have wrong positions.
    """
    if isinstance(child, ast.JoinedStr | ast.Assert):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return child in node.decorator_list or child is node.returns
    if isinstance(node, ast.ClassDef):
        return child not in node.body
    if isinstance(node, ast.arg | ast.AnnAssign):
        return child is node.annotation
    if isinstance(child, ast.Assign):
        return _names_a_type(child.value) or any(isinstance(t, ast.Name) and t.id == "__all__" for t in child.targets)
    return isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"


_GENERIC = {
    "Callable", "Iterator", "Literal", "Mapping", "Sequence", "deque", "dict", "frozenset", "list", "set", "tuple",
    "type",
}  # fmt: skip


def _names_a_type(value: ast.expr) -> bool:
    """True if it is an alias, ``tuple[int, str]``, which only annotations use."""
    return isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id in _GENERIC


def read_mutants(root: Path, file: Path, unseen: Collection[str] = ()) -> list[Mutant]:
    """All mutants of a file below ``root``. ``unseen``: see ``mutants_of``."""
    return mutants_of(file.read_bytes(), file.relative_to(root).as_posix(), unseen)
