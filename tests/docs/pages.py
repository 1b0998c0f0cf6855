"""All pages of the documentation: those of docs/, and those that ``ci/reference.py`` makes, without writing them."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path

from transcript import ROOT

DOCS = ROOT / "docs"


@cache
def generated() -> dict[str, str]:
    """Path in ``docs/`` of each generated page and picture -> its text."""
    sys.path.insert(0, str(ROOT / "ci"))
    try:
        made: dict[str, str] = importlib.import_module("reference").pages()
    finally:
        sys.path.remove(str(ROOT / "ci"))
    return made


@cache
def all_pages() -> dict[Path, str]:
    """Path in the repository of each page -> its text; generated pages have the path that they have on the site."""
    written = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    made = {DOCS / name: text for name, text in generated().items() if name.endswith(".md")}
    return dict(sorted({**{page: page.read_text() for page in written}, **made}.items()))
