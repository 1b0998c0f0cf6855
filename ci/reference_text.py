"""Docstrings as Markdown: fields and methods of classes, tables of reStructuredText, commands of the command line."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RULE = re.compile(r"^=+(?: +=+)+$")


@dataclass(frozen=True)
class Attribute:
    """One annotated attribute of a class, as its source has it."""

    name: str
    annotation: str
    default: str
    """Source of the default; empty if there is none."""
    text: str


def attributes(cls: type[Any]) -> list[Attribute]:
    """Annotated attributes of a class in the order of its source."""
    source = textwrap.dedent(inspect.getsource(cls))
    (node,) = (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef))
    found = []
    for at, each in enumerate(node.body):
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        following = node.body[at + 1] if at + 1 < len(node.body) else None
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = inspect.cleandoc(str(following.value.value))
        default = ast.unparse(each.value) if each.value else ""
        found.append(Attribute(each.target.id, ast.unparse(each.annotation), _plain(default), text))
    return found


def _plain(default: str) -> str:
    """A default as an author writes it: a set and not a frozenset, the value and not ``field(...)``."""
    factory = re.fullmatch(r"field\(default_factory=(\w+).*\)", default)
    if factory:
        return {"dict": "{}", "list": "[]"}.get(factory[1], f"{factory[1]}()")
    value = re.match(r"field\(default=(\w+)", default)
    if value:
        return value[1]
    return re.sub(r"frozenset\((.*)\)", lambda match: match[1] or "set()", default)


def methods(cls: type[Any], *, private: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    """Name, signature and docstring of public methods and properties, in the order of the source."""
    found = []
    for name, member in vars(cls).items():
        if name.startswith("_") and name not in private:
            continue
        function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        if not inspect.isfunction(function):
            continue
        is_method = function is member or isinstance(member, classmethod)
        signature = signature_of(function) if is_method else ""
        found.append((name, signature, inspect.getdoc(function) or ""))
    return found


def signature_of(function: Callable[..., Any]) -> str:
    """Parameters and result as the source has them, without ``self`` and without module names."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    if node.args.args and node.args.args[0].arg in ("self", "cls"):
        del node.args.args[0]
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){result}".replace("torch.Tensor", "Tensor")


def markdown(text: str) -> str:
    """A docstring as Markdown: code in single backquotes, simple tables as tables, blocks of code as fences."""
    out: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if _RULE.match(line.strip()):
            out += _table(line.strip(), lines)
        elif line.endswith("::"):
            out += [line[:-2] + ":", *_code(lines)]
        else:
            out.append(line)
    return re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", "\n".join(out)).strip()


def _code(lines: Iterator[str]) -> Iterator[str]:
    """The indented block that follows, as a fence, and the line after it."""
    block: list[str] = []
    after = ""
    for line in lines:
        if line.strip() and not line.startswith("    "):
            after = line
            break
        block.append(line)
    yield from ("", "```python", *textwrap.dedent("\n".join(block)).strip().splitlines(), "```", "", after)


def _table(rule: str, lines: Iterator[str]) -> Iterator[str]:
    """A simple table whose first rule is ``rule``; a row without a first cell continues the one above it."""
    starts = [match.start() for match in re.finditer("=+", rule)]
    ends = [*starts[1:], None]
    rows: list[list[str]] = []
    heads, rules = 0, 1
    for raw in lines:
        line = raw.strip() if _RULE.match(raw.strip()) else raw
        if _RULE.match(line):
            rules += 1
            heads = heads or len(rows)
            if rules == 3:
                break
            continue
        cells = [line[a:b].strip().replace("|", "\\|") for a, b in zip(starts, ends, strict=True)]
        # A row whose first cell ends with a comma is continued there, too.
        if rows and len(rows) > heads and (not cells[0] or rows[-1][0].endswith(",")):
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    yield ""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |"
        if number == 0:
            yield f"|{'---|' * len(row)}"
    yield ""


def attribute_sections(cls: type[Any], level: int = 3, *, skip: tuple[str, ...] = ()) -> list[str]:
    """A section for each attribute with its type, default and text."""
    lines: list[str] = []
    for each in attributes(cls):
        if each.name in skip:
            continue
        default = f" Default: `{each.default}`." if each.default else " Required."
        shape = each.annotation.replace("torch.Tensor", "Tensor")
        lines += [f"{'#' * level} `{each.name}`", "", f"`{shape}`.{default}", ""]
        lines += [markdown(each.text), ""] if each.text else []
    return lines


def attribute_table(cls: type[Any], *, required: str = "") -> list[str]:
    """A table of attributes: name, type and default, text. Attributes without a text are listed too."""
    lines = ["| field | type | meaning |", "|---|---|---|"]
    for each in attributes(cls):
        shape = each.annotation.replace("torch.Tensor", "Tensor").replace("|", "\\|")
        default = f" = `{each.default}`" if each.default else required
        text = " ".join(markdown(each.text).split()).replace("|", "\\|")
        lines.append(f"| `{each.name}` | `{shape}`{default} | {text} |")
    return [*lines, ""]


def method_sections(cls: type[Any], level: int = 3, *, skip: tuple[str, ...] = ()) -> list[str]:
    """A section for each public method and property."""
    lines: list[str] = []
    for name, signature, text in methods(cls):
        if name in skip:
            continue
        lines += [f"{'#' * level} `{name}`", ""]
        lines += ["```python", _wrapped(f"{name}{signature}"), "```", ""] if signature else []
        lines += [markdown(text), ""]
    return lines


def _wrapped(call: str) -> str:
    """A signature in lines of at most 88 characters: an argument per line if it is longer."""
    if len(call) <= 88:
        return call
    (node,) = ast.parse(f"def {call}: ...").body
    assert isinstance(node, ast.FunctionDef)
    arguments = re.split(r", (?![^\[(]*[\])])", ast.unparse(node.args))
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return "\n".join([f"{node.name}(", *(f"    {each}," for each in arguments), f"){result}"])


def function_section(name: str, function: Callable[..., Any], level: int = 2) -> list[str]:
    """A section for a function."""
    call = _wrapped(f"{name}{signature_of(function)}")
    text = (inspect.getdoc(function) or "").partition("\n\nArgs:")[0]
    return [f"{'#' * level} `{name}`", "", "```python", call, "```", "", markdown(text), ""]


def write(pages: dict[str, str], folder: Path) -> None:
    """Write pages at their paths in an empty ``folder``: what stands there is deleted."""
    if folder.exists():
        shutil.rmtree(folder)
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
