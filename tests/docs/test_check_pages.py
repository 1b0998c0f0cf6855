"""Each check has a page and a row of the index, and each known bug a row; ``audit --list`` has the broken backends."""

from __future__ import annotations

import re

import pytest
from pages import generated

from attn_testkit.checks import CHECKS
from attn_testkit.cli import main
from attn_testkit_corpus.faults import all_controls, all_faults, all_known_bugs


def test_every_check_has_a_page_with_all_that_is_said_about_it_and_the_index_links_it() -> None:
    pages = generated()
    assert {name for name in pages if name.startswith("reference/checks/")} == {
        f"reference/checks/{check}.md" for check in CHECKS
    }
    for check in CHECKS.values():
        page = pages[f"reference/checks/{check.id}.md"]
        assert page.startswith(f"# {check.id}\n")
        assert all(words in page for words in (check.text, check.cause, check.source, check.how_to_read))
        assert f"(checks/{check.id}.md)" in pages["reference/checks.md"]


def test_the_command_lists_every_broken_and_known_good_backend_with_its_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["audit", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[2:].split()[0]: line for line in lines if len(line) > 2}
    for fault in all_faults():
        assert rows[fault.slug].startswith(f"{fault.bug_class} ")
        assert f" {fault.checks[0]} " in rows[fault.slug]
        assert fault.modelled in rows[fault.slug]
    assert all(" must pass " in rows[control.slug] for control in all_controls())


def test_every_known_bug_has_a_line_with_its_threads_and_its_verdict_and_the_head_counts_them() -> None:
    page, known = generated()["evidence/known-bugs.md"], all_known_bugs()
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
