"""Prints what a change of the kit costs to hold: files that a feature touches, lines, words, and what must be learned.

    python ci/cost.py

A core file touches a feature if it says one of its words. Core is what an addition must change: the kit without its
adapters, and without ``packages/``.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("attn_testkit", "runner_modes", "packages")
APART = {"backends", "packages", "vendor"}
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
    tests = [
        path
        for folder in (ROOT / "tests", *ROOT.glob("packages/*/tests"))
        for path in folder.rglob("*.py")
        if "field_bugs" not in path.parts
    ]
    pages = list((ROOT / "docs").rglob("*.md"))
    glossary = tomllib.loads(next((ROOT / "attn_testkit").rglob("glossary.toml")).read_text())
    words, entries = declared()
    return [
        *((f"core files that {feature} touches", len(touched(word, core))) for feature, word in FEATURES.items()),
        ("lines of all packages", lines(files)),
        ("lines of attn_testkit and runner_modes", lines(path for path in files if "packages" not in path.parts)),
        ("lines of tests without field bugs", lines(tests)),
        ("words of docs", sum(len(page.read_text().split()) for page in pages)),
        ("entries of the glossary", sum(len(group["words"]) for group in glossary["group"])),
        ("words that an author can declare", words),
        ("entries of Capabilities", entries),
        # A test holds the page to the code.
        ("arrows between packages", int(re.findall(r"(\d+) dependencies", (ROOT / "ARCHITECTURE.md").read_text())[0])),
    ]


if __name__ == "__main__":
    for name, figure in table():
        print(f"{name:40}{figure:>10,}")
