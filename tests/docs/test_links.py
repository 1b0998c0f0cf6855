"""Every link between pages and files of the repository leads somewhere, and every anchor to a heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transcript import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.M | re.S)
_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)")


def without_code(text: str) -> str:
    return _CODE.sub("", text)


def links(text: str) -> list[str]:
    """Targets of inline links and pictures, those in code left out."""
    return [target for target in _LINK.findall(without_code(text)) if "://" not in target]


def anchor(heading: str) -> str:
    """As GitHub and mkdocs make it: words in lower case, joined by hyphens."""
    words = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "]", heading).lower())
    return re.sub(r"[\s]", "-", words.strip())


def anchors(text: str) -> set[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return {anchor(heading) for heading in re.findall(r"^#+ +(.+)$", prose, re.M)}


def broken(page: Path) -> list[str]:
    """The page's links that lead nowhere."""
    found = []
    for link in links(page.read_text()):
        path, _, name = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists():
            found.append(f"{link}: no such file")
        elif name and target.suffix == ".md" and name not in anchors(target.read_text()):
            found.append(f"{link}: no such heading")
    return found


def test_no_link_of_a_page_is_broken() -> None:
    assert [f"{page.relative_to(ROOT)}: {link}" for page in PAGES for link in broken(page)] == []


def test_every_page_can_be_reached_from_the_home_page() -> None:
    reached, ahead = set(), [ROOT / "docs" / "index.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page.read_text())]
            ahead += [target for target in targets if target.suffix == ".md" and target.exists()]
    assert sorted({*(ROOT / "docs").rglob("*.md")} - reached) == []


def test_a_broken_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# Other\n\n## What `it` does, and why\n\n```\n# no heading\n```\n")
    page.write_text(
        "# Page\n[a](other.md#what-it-does-and-why) [b](other.md#nothing) [c](none.md) [d](#page) [e](#pages)\n"
        "`[f](none.md)` [g](https://example.org/none.md) [h](other.md#no-heading) [i](../outside.md)\n"
    )
    assert [text.partition(":")[0] for text in broken(page)] == [
        "other.md#nothing", "none.md", "#pages", "other.md#no-heading", "../outside.md",
    ]  # fmt: skip
