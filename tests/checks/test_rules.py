"""The contract: its rules, the checks, the fields that a backend declares and the page say the same."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from attn_testkit.cases.features.server.table import SERVER_VARIANTS
from attn_testkit.cases.features.table import FEATURES
from attn_testkit.cli import main
from attn_testkit.contract import Capabilities, Needs, Promises, ServerConventions
from attn_testkit.families.table import FAMILIES
from attn_testkit.results.checks import CHECKS
from attn_testkit.results.finding import Finding
from attn_testkit.results.names import MODES
from attn_testkit.results.rules import AREAS, RULES, VERSION, rule_of, with_rule
from attn_testkit_corpus.faults import all_faults, all_known_bugs
from attn_testkit_corpus.faults.catalogue import field_bugs_in

FIELD_BUGS = Path(__file__).parents[2] / "packages" / "corpus" / "tests" / "field_bugs"


def test_ids_are_dense_and_ordered() -> None:
    counts = dict.fromkeys(AREAS, 0)
    for rule in RULES:
        area = rule.id.split("-")[1]
        counts[area] += 1
        assert rule.id == f"AB-{area}-{counts[area]:03}"
    assert [rule.id.split("-")[1] for rule in RULES] == [area for area in AREAS for _ in range(counts[area])]
    assert all(counts.values())


def test_each_check_has_a_rule_of_its_own_and_each_rule_names_checks_that_exist() -> None:
    assert {rule_of(check) for check in CHECKS} <= {rule.id for rule in RULES}
    assert [check for check in CHECKS if not rule_of(check)] == []
    assert len({rule_of(check) for check in CHECKS}) == len(CHECKS), "two checks share a rule"
    assert {check for rule in RULES for check in rule.checks} == {*CHECKS}


def test_rules_name_modes_families_and_features_that_exist() -> None:
    words = {each.name for each in FEATURES} | {*SERVER_VARIANTS}
    for rule in RULES:
        assert {*rule.modes} <= {*MODES}, rule.id
        assert {*rule.families} <= {*FAMILIES}, rule.id
        assert {*rule.features} <= words, rule.id
        assert rule.text.endswith("."), rule.id


def test_each_refusal_and_each_promise_belongs_to_a_rule() -> None:
    named = {name for rule in RULES for name in rule.declared}
    refused = {name for rule in RULES if rule.id.startswith("AB-REFUSE") for name in rule.declared}
    entries = {field.name for field in fields(Capabilities)}
    assert {name.partition(".")[0] for name in named} <= entries
    # A constructor sees no sender of memory, and no transfer to the host.
    assert entries - refused == {"promises", "receives", "offloads", "needs", "requires", "mode_requires"}
    promised = {
        f"{entry}.{field.name}"
        for entry, record in (("promises", Promises), ("needs", Needs), ("server", ServerConventions))
        for field in fields(record)
    }
    assert promised - named == set()
    assert {name for name in named if name.partition(".")[0] in ("promises", "needs", "server")} - promised == {
        "server"
    }


def threads(text: str) -> set[str]:
    """Threads in a source such as ``sglang #1, #2; vLLM 1a2b3c4d``."""
    found, project = set(), ""
    for part in re.split(r"[;,()]", text):
        if match := re.search(r"(?:(?:[\w.-]+/)?([\w.-]+) )?(#\d+|\b[0-9a-f]{8,9}\b)", part):
            project = match[1] or project
            found.add(f"{project} {match[2]}".lower())
    return found


def test_each_bug_of_a_rule_is_recorded_in_the_kit() -> None:
    sources = [check.source for check in CHECKS.values()]
    sources += [thread for bug in all_known_bugs().bugs for thread in bug.threads]
    sources += [entry.source for entry in (*all_faults(), *field_bugs_in(str(FIELD_BUGS)))]
    recorded = {thread for source in sources for thread in threads(source)}
    for rule in RULES:
        assert len(rule.bugs) <= 2
        assert [bug for bug in rule.bugs if bug.lower() not in recorded] == [], rule.id


def test_a_finding_names_the_rule_that_its_check_tests_first() -> None:
    assert Finding("writes-own-kv", "headline").rule == "AB-WRITE-001"
    assert with_rule("matches-oracle") == "matches-oracle (AB-OUTPUT-004)"
    assert with_rule("crashed") == "crashed"


def test_explain_prints_a_rule_whatever_its_letter_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "ab-run-009"]) == 0
    assert "checks   not tested" in capsys.readouterr().out


def test_the_page_has_each_rule_with_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "ci"))
    from contract_page import contract_page

    page = contract_page()["contract/index.md"]
    assert page.startswith(f"# Attention backend contract {VERSION}\n")
    assert re.findall(r"^### (.+)$", page, re.M) == [rule.id for rule in RULES]
    for rule in RULES:
        section = page.split(f"### {rule.id}\n", 1)[1].split("\n### ", 1)[0]
        assert f"| {rule.level} | {rule.text} |" in section
        assert all(f"`{check}`" in section for check in rule.checks)
        assert rule.checks or "| not tested |" in section
        assert all(bug in section for bug in rule.bugs)
