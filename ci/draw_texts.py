"""Draws texts at random for reading aloud: sentences of the pages, hints, comments, and docstrings, also those of tests
and field bugs.

    python ci/draw_texts.py --seed 1             # thirty of each
    python ci/draw_texts.py --seed 1 --count 5

The same seed draws the same texts as long as the texts stay the same.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
_HINTS = (
    "attn_testkit/diagnosis",
    "attn_testkit/checks",
    "packages/cuda_on_cpu/cuda_on_cpu/errors.py",
    "attn_testkit/graphs",
)
"""Where hints are written."""
_SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z`*\[])")
_LEAST_WORDS = 5


def sentences() -> Iterator[tuple[str, str]]:
    """Sentences of the pages: prose and items of lists, no tables, headings or code."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text("utf-8"))
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", text):
            if not re.match(r"\s*(#|\||!\[|<|---)", paragraph):
                for each in _SENTENCE.split(" ".join(re.sub(r"^\s*(?:[*-]|\d+\.) ", "", paragraph).split())):
                    yield str(page.relative_to(ROOT)), each


def _python(*parts: str) -> Iterator[tuple[str, ast.Module]]:
    for part in parts:
        path = ROOT / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text("utf-8"))


def hints() -> Iterator[tuple[str, str]]:
    """String literals of several words in the code that explains failures; a placeholder shows as {}."""
    for name, tree in _python(*_HINTS):
        kept = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if id(node) in kept | inside:
                continue
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(_part(part) for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            if re.match(r"[\w{`]", text) and "|" not in text:
                yield f"{name}:{node.lineno}", text


def _part(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def _docstrings(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Docstrings of modules, classes, functions and fields, the first paragraph of each."""
    for name, tree in _python(*files):
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield f"{name}:{node.lineno}", " ".join(node.value.value.partition("\n\n")[0].split())


def _files(*, tests: bool, field_bugs: bool = False) -> list[str]:
    """Python files of the repository, without environments and builds. ``tests``: those in a folder of tests."""
    found = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py"))]
    own = [path for path in found if not any(part.startswith(".") or part in _BUILT for part in path.parts)]
    return [
        str(path) for path in own if ("tests" in path.parts) is tests and ("field_bugs" in path.parts) is field_bugs
    ]


_BUILT = ("build", "site")


def comments() -> Iterator[tuple[str, str]]:
    """Comments of one line or several."""
    for name in [*_files(tests=False), *_files(tests=True), *_files(tests=True, field_bugs=True)]:
        found: list[str] = []
        for number, line in enumerate([*(ROOT / name).read_text("utf-8").splitlines(), ""], 1):
            comment = re.fullmatch(r"\s*# (?!type:|noqa|fmt:|ruff:)(.*)", line)
            if comment:
                found.append(comment[1])
            elif found:
                yield f"{name}:{number - len(found)}", " ".join(found)
                found = []


KINDS: Mapping[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "sentences": sentences,
    "hints": hints,
    "docstrings": lambda: _docstrings(_files(tests=False)),
    "docstrings of tests": lambda: _docstrings(_files(tests=True)),
    "docstrings of field bugs": lambda: _docstrings(_files(tests=True, field_bugs=True)),
    "comments": comments,
}


def drawn(kind: str, seed: int, count: int) -> list[tuple[str, str]]:
    """Draw texts of a kind, each with its place."""
    found = sorted({(place, text) for place, text in KINDS[kind]() if len(text.split()) >= _LEAST_WORDS})
    return random.Random(f"{seed} {kind}").sample(found, count)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seed", type=int, default=1)
@click.option("--count", type=int, default=30, help="Texts of each kind.")
def main(seed: int, count: int) -> None:
    """Print texts to read aloud."""
    for kind in KINDS:
        print(f"\n{kind}, seed {seed}")
        for number, (place, text) in enumerate(drawn(kind, seed, count), 1):
            print(f"{number:>3} {place}: {text}")


if __name__ == "__main__":
    main()
