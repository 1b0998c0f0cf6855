"""Prints what a change of the kit costs to hold: files that a feature touches, lines, words, and what must be learned.

    python ci/cost.py

A core file touches a feature if it says one of its words. Core is what an addition must change: packages without seeded
bugs, adapters, bridges and the emulation.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("attn_testkit", "runner_modes", "packages")
APART = {"faults", "backends", "bridges", "emulation", "vendor"}
"""Folders that are not core."""
FEATURES = {
    "spans": r"spans?|Spans?|span_\w+|spans_\w+|\w+_spans?|mm_prefix_range\w*",
    "alibi": r"\w*(alibi|Alibi|ALIBI)\w*",
    "qq_bias": r"\w*qq_bias\w*|query_bias\w*|QueryBias\w*",
    "narrower_widths": r"\w*(narrower_widths|NARROWER_WIDTHS|width_of|of_width|draft_widths|shares_widths)",
    "padding-finite": r"padding-finite|padding_finite|finite_padding|PADDING_FINITE",
}
"""Feature -> regular expression of its identifiers, which are compared as whole words."""


def modules() -> list[Path]:
    """Python files of all packages."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in found if "tests" not in path.relative_to(ROOT).parts)


def is_core(path: Path) -> bool:
    """True for a file that an addition to the kit may have to change."""
    return not APART & set(path.relative_to(ROOT).parts)


def touched(word: str, files: Iterable[Path]) -> list[Path]:
    """Files that say a word, in code, text or comments."""
    pattern = re.compile(rf"(?<![\w-])(?:{word})(?![\w-])")
    return [path for path in files if pattern.search(path.read_text())]


def lines(files: Iterable[Path]) -> int:
    """Lines of these files."""
    return sum(len(path.read_text().splitlines()) for path in files)


def arrows(files: Iterable[Path]) -> set[tuple[str, str]]:
    """(package, package that it imports), of those directly in ``attn_testkit``; ``__init__`` is none."""
    found = set()
    for path in files:
        inside = list(path.relative_to(ROOT).parts)
        parts = ["attn_testkit", *(inside if inside[0] == "runner_modes" else inside[1:])]
        package = parts[1].removesuffix(".py")
        if not package.startswith("__"):
            found |= {(package, other) for other in _imported(path, parts) if other != package}
    return found


def _imported(path: Path, parts: list[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module] if node.module else [f"{module}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("attn_testkit."))


def declared() -> tuple[int, int]:
    """Number of words that an author can declare, and of entries of ``Capabilities``: a record counts by its fields."""
    from attn_testkit import contract

    entries = dataclasses.fields(contract.Capabilities)
    return sum(_words(contract, entry) for entry in entries), len(entries)


def _words(contract: ModuleType, entry: dataclasses.Field[Any]) -> int:
    """Words of a field: those of the record that it holds, or one."""
    record = getattr(contract, str(entry.type).removesuffix(" | None"), None)
    if not dataclasses.is_dataclass(record):
        return 1
    return sum(_words(contract, inner) for inner in dataclasses.fields(record))


def table() -> list[tuple[str, int]]:
    """Names and figures."""
    files = modules()
    core = [path for path in [*files, *(ROOT / "attn_testkit").rglob("*.toml")] if is_core(path)]
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "field_bugs" not in path.parts]
    pages = list((ROOT / "docs").rglob("*.md"))
    glossary = tomllib.loads(next((ROOT / "attn_testkit").rglob("glossary.toml")).read_text())
    words, entries = declared()
    return [
        *((f"core files that {feature} touches", len(touched(word, core))) for feature, word in FEATURES.items()),
        ("lines of packages", lines(files)),
        ("lines of tests without field bugs", lines(tests)),
        ("words of docs", sum(len(page.read_text().split()) for page in pages)),
        ("entries of the glossary", sum(len(group["words"]) for group in glossary["group"])),
        ("words that an author can declare", words),
        ("entries of Capabilities", entries),
        ("arrows between packages", len(arrows(path for path in files if path.parts[len(ROOT.parts)] != "packages"))),
    ]


if __name__ == "__main__":
    for name, figure in table():
        print(f"{name:40}{figure:>10,}")
