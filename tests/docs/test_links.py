"""Every link between pages and files of the repository leads somewhere, and every anchor to a heading.

Pages of docs/ may link to generated ones, which are on the site only. README.md and the other pages outside of docs/
are read on a code host, so they link to files of the repository only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pages import DOCS, all_pages, generated
from transcript import ROOT

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


def linked(page: Path, link: str) -> Path:
    """The file to which a link leads."""
    path = link.partition("#")[0]
    return (page.parent / path).resolve() if path else page


def broken(page: Path, text: str, made: Mapping[Path, str]) -> list[str]:
    """The page's links that lead nowhere; ``made`` has files that may be linked and need not exist, with their text."""
    found = []
    for link in links(text):
        name, target = link.partition("#")[2], linked(page, link)
        if target not in made and not (target.is_relative_to(ROOT) and target.exists()):
            found.append(f"{link}: no such file")
        elif name and target.suffix == ".md" and name not in anchors(made.get(target) or target.read_text()):
            found.append(f"{link}: no such heading")
    return found


def test_no_link_of_a_page_is_broken() -> None:
    made = {DOCS / name: text for name, text in generated().items()}
    on_the_site = {page: text for page, text in all_pages().items() if DOCS in page.parents}
    wrong = [(page, link) for page, text in on_the_site.items() for link in broken(page, text, made)]
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in wrong] == []


@pytest.mark.parametrize(
    "folder",
    ["*.md", "contrib/**/*.md", "packages/corpus/**/*.md", "packages/cuda_on_cpu/**/*.md", "packages/servers/**/*.md"],
)
def test_a_page_outside_of_docs_links_to_files_of_the_repository_only(folder: str) -> None:
    pages = sorted(ROOT.glob(folder))
    assert pages
    wrong = [(page, link) for page in pages for link in broken(page, page.read_text(), {})]
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in wrong] == []


def test_no_generated_page_is_committed() -> None:
    assert [name for name in generated() if (DOCS / name).exists()] == []


def test_every_page_can_be_reached_from_the_home_page() -> None:
    pages = all_pages()
    reached, ahead = set(), [DOCS / "index.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            ahead += [target for link in links(pages[page]) if (target := linked(page, link)) in pages]
    assert sorted(page for page in pages if DOCS in page.parents and page not in reached) == []


def test_a_broken_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# Other\n\n## What `it` does, and why\n\n```\n# no heading\n```\n")
    page.write_text(
        "# Page\n[a](other.md#what-it-does-and-why) [b](other.md#nothing) [c](none.md) [d](#page) [e](#pages)\n"
        "`[f](none.md)` [g](https://example.org/none.md) [h](other.md#no-heading) [i](../outside.md)\n"
    )
    assert [text.partition(":")[0] for text in broken(page, page.read_text(), {})] == [
        "other.md#nothing", "none.md", "#pages", "other.md#no-heading", "../outside.md",
    ]  # fmt: skip


def test_a_link_to_a_page_that_is_made_leads_there_and_its_anchor_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    text, made = "[a](made.md#there) [b](made.md#gone)", {tmp_path / "made.md": "# There\n"}
    assert broken(tmp_path / "page.md", text, made) == ["made.md#gone: no such heading"]
    assert broken(tmp_path / "page.md", "[a](made.md)", {}) == ["made.md: no such file"]
