"""The pages of the checks are what the audit writes: one for each, with an index and the catalogue of faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transcript import ROOT

from attn_testkit.checks import CHECKS
from attn_testkit.cli import main
from attn_testkit_corpus.audit.show import check_pages
from attn_testkit_corpus.faults import all_controls, all_faults, all_known_bugs

DOCS = ROOT / "docs"


def test_the_pages_are_up_to_date() -> None:
    stale = [name for name, text in check_pages().items() if (DOCS / name).read_text() != text]
    assert stale == [], "run: attn-testkit audit --docs docs"


def test_no_page_is_left_of_a_check_that_is_gone() -> None:
    written = {f"reference/checks/{page.name}" for page in (DOCS / "reference" / "checks").iterdir()}
    assert written | {"reference/checks.md", "evidence/known-bugs.md"} == set(check_pages())


def test_every_check_has_a_page_with_all_that_is_said_about_it_and_the_index_links_it() -> None:
    pages = check_pages()
    assert len(pages) == len(CHECKS) + 3
    for check in CHECKS.values():
        page = pages[f"reference/checks/{check.id}.md"]
        assert page.startswith(f"# {check.id}\n")
        assert all(words in page for words in (check.text, check.cause, check.source, check.how_to_read))
        assert f"(checks/{check.id}.md)" in pages["reference/checks.md"]


def test_every_fault_stands_on_the_page_of_the_check_that_must_catch_it_first() -> None:
    pages = check_pages()
    for fault in all_faults():
        assert f"| [`{fault.slug}`]" in pages[f"reference/checks/{fault.checks[0]}.md"]


def test_the_catalogue_names_controls_and_what_is_scaled_down() -> None:
    page = check_pages()["reference/checks/catalogue.md"]
    assert all(f"| `{control.slug}` |" in page for control in all_controls())
    assert all(f"* `{fault.slug}`: " in page for fault in all_faults() if fault.modelled)


def test_every_known_bug_has_a_line_with_its_threads_and_its_verdict_and_the_head_counts_them() -> None:
    page, known = check_pages()["evidence/known-bugs.md"], all_known_bugs()
    named = [(re.search(r" \(`([\w.-]+)`\) \| ", line), line) for line in page.splitlines()]
    lines = {match[1]: line for match, line in named if match}
    assert list(lines) == [bug.name for bug in known.bugs]
    for bug in known.bugs:
        _, _, threads, verdict, _ = re.split(r"(?<!\\)\|", lines[bug.name])
        assert all(thread in threads for thread in bug.threads)
        assert all(f"[`{slug}`](../reference/checks/" in verdict for slug in bug.faults)
        assert (f"*{bug.outside}*: {bug.why}" in verdict) is bool(bug.outside)
    met = sum(bool(bug.faults) for bug in known.bugs)
    assert page.startswith("# Known bugs\n")
    assert f"{len(known.bugs)} bugs that" in page
    assert f"**{met} are reproduced**" in page
    assert f"**{len(known.bugs) - met} are out of reach**" in page
    for kind in known.outside:
        assert f"| {kind} | {sum(bug.outside == kind for bug in known.bugs)} |" in page


def test_the_command_writes_them_into_the_tree_and_names_a_page_of_no_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "reference" / "checks"
    folder.mkdir(parents=True)
    (folder / "old-check.md").touch()
    assert main(["audit", "--docs", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"attn-testkit: {folder}/old-check.md belongs to no check; remove it\n"
    written = {page.relative_to(tmp_path).as_posix() for page in tmp_path.rglob("*.md")}
    assert written == {*check_pages(), "reference/checks/old-check.md"}
    assert "(checks/finite.md)" in (tmp_path / "reference" / "checks.md").read_text()
    assert "(../checks.md)" in (folder / "finite.md").read_text()


@pytest.mark.parametrize(("name", "says"), [("none", "no such folder"), ("file", "no such folder")])
def test_a_folder_that_is_none_is_an_error_in_one_line(
    name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["audit", "--docs", str(tmp_path / name)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_folder_that_cannot_be_made_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reference").touch()
    assert main(["audit", "--docs", str(tmp_path)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "reference") in line
