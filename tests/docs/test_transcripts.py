"""What the README and the pages show is what the programs print: every ``console`` fence is run, file by file."""

from __future__ import annotations

from pathlib import Path

import pytest
from transcript import ROOT, Fence, commands, differences, fences, write

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SHOWN = [page for page in PAGES if any(fence.language == "console" for fence in fences(page))]
NAMES = [page.relative_to(ROOT).as_posix() for page in SHOWN]


def test_the_pages_with_transcripts_are_found() -> None:
    assert {"README.md", "docs/tutorials/your-first-backend.md", "docs/tutorials/graph-hooks.md"} <= set(NAMES)


@pytest.mark.parametrize("page", SHOWN, ids=NAMES)
def test_a_page_shows_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    found = list(differences(page, tmp_path))
    assert not found, "\n\n".join(["mend the code or run: python tests/docs/transcript.py PAGE", *found])


def every_fence() -> list[Fence]:
    return [fence for page in PAGES for fence in fences(page)]


def test_what_looks_like_a_transcript_is_run() -> None:
    """Commands behind ``$`` with their output in a fence of another kind would be shown and never compared."""
    others = [fence.place for fence in every_fence() if fence.language != "console" and fence.body.startswith("$ ")]
    assert others == []


def test_no_transcript_lacks_its_output() -> None:
    bare = [
        fence.place for fence in every_fence() if fence.language == "console" and not commands(fence.body)[-1].printed
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("page", "name"), [("your-first-backend", "my_decode.py"), ("graph-hooks", "planned_decode.py")]
)
def test_the_file_to_copy_is_the_one_that_the_page_ends_with(page: str, name: str, tmp_path: Path) -> None:
    for fence in fences(ROOT / "docs" / "tutorials" / f"{page}.md"):
        if fence.title:
            write(fence, tmp_path)
    assert (tmp_path / name).read_text() == (ROOT / "docs" / "code" / name).read_text()


def test_every_file_of_code_is_shown_on_a_page() -> None:
    shown = {fence.title for fence in every_fence()}
    assert {path.name for path in (ROOT / "docs" / "code").glob("*.py")} <= shown
