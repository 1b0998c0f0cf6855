"""What is declared and was not tried stands beside the verdict, in the record and on the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_runner
import jsonschema
import pytest
from in_process import plan_run
from signed import of_an_earlier_version

from attn_testkit.cli.show import print_summary
from attn_testkit.plugin.session import Session
from attn_testkit.reports.outcome import Results
from attn_testkit.reports.record import Record, Report, read_report, schema
from attn_testkit.reports.render import html_page, markdown_summary
from attn_testkit.reports.verdict import conclude
from attn_testkit.results.remarks import not_covered_lines
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.known_failures import Ledger
from attn_testkit.running.planning.request import Prepared, Request, param_id

SPEC = "fake:ok"
LEFT = {SPEC: ("head dim 96, 512", "more than 7 of 64 query rows (target-verify)")}
LINE = "not covered: head dim 96, 512; more than 7 of 64 query rows (target-verify)"


def report(not_covered: dict[str, tuple[str, ...]]) -> Report:
    plan = fake_runner.plan_run(backends=[SPEC])
    results = (*plan.preset, *map(fake_runner.run_item, plan.items))
    return Report(replace(plan.header, not_covered=not_covered), results, finished=True, exit_code=0)


def test_a_line_for_each_backend_that_has_any_and_its_name_where_there_are_several() -> None:
    assert not_covered_lines({}) == not_covered_lines({"a:B": ()}) == []
    assert not_covered_lines({"a:B": ("x", "y")}) == ["not covered: x; y"]
    assert not_covered_lines({"a:B": ("x", "y")}, "-v lists them") == ["not covered: 2 declared values; -v lists them"]
    assert not_covered_lines({"a:B": ("x",)}, "-v") == ["not covered: 1 declared value; -v"]
    assert not_covered_lines({"a:B": ("x",), "c:D": (), "e:F": ("y",)}) == [
        "not covered (a:B): x",
        "not covered (e:F): y",
    ]


def test_the_terminal_has_it_above_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    four = {SPEC: (*LEFT[SPEC], "a", "b")}
    for not_covered, lines in ((four, 1), ({SPEC: ()}, 0)):
        made = report(not_covered)
        print_summary(made.header, made.results, problems=(), interrupted=False, code=0)
        *before, last = capsys.readouterr().out.splitlines()
        assert last.startswith("CONFORMANT (smoke)")
        assert ("; 4 declared values were not tried; emulated" in last) is bool(lines)
        shown = "not covered: 4 declared values; --show-not-covered lists them"
        assert [line for line in before if line.startswith("not covered")] == [shown] * lines
        print_summary(made.header, made.results, problems=(), interrupted=False, code=0, show_not_covered=True)
        assert (f"{LINE}; a; b" in capsys.readouterr().out.splitlines()) is bool(lines)


def test_a_declared_value_that_the_tier_could_have_tried_makes_a_green_run_partial() -> None:
    made = report(LEFT)
    header = replace(made.header, tier="core", lacking={SPEC: ("narrower_widths (target-verify): why",)})
    found = conclude(header, made.results)
    assert found.word == "PARTIAL"
    assert "; no case tries narrower_widths (target-verify): why, which is declared" in str(found)
    assert conclude(replace(header, lacking={SPEC: ()}), made.results).word == "CONFORMANT (core)"


def test_what_is_never_together_is_shown_where_one_asks_for_it_and_on_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = report({})
    made = replace(made, header=replace(made.header, excluded={SPEC: ("a with b: reason <1>",)}))
    line = "never together: a with b: reason <1>"
    for asked in (False, True):
        print_summary(made.header, made.results, problems=(), interrupted=False, code=0, show_not_covered=asked)
        assert (line in capsys.readouterr().out.splitlines()) is asked
    assert "never together: a with b: reason &lt;1&gt;" in html_page(made)


def test_a_verdict_names_three_declared_values_that_nothing_tried_and_no_line_repeats_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = report(LEFT)
    print_summary(made.header, made.results, problems=(), interrupted=False, code=0)
    *before, last = capsys.readouterr().out.splitlines()
    assert "; not tried: head dim 96, 512; more than 7 of 64 query rows (target-verify); emulated device" in last
    assert not any(line.startswith("not covered") for line in before)
    print_summary(made.header, made.results, problems=(), interrupted=False, code=0, show_not_covered=True)
    assert LINE in capsys.readouterr().out.splitlines(), "somebody asked for them"
    two = replace(made.header, backends={SPEC: "", "b:B": ""})
    assert "; not tried: head dim 96, 512 of fake:ok; " in str(conclude(two, made.results))


@pytest.mark.parametrize("tier", ["smoke", "core", "full"])
def test_the_tier_is_in_the_verdict_and_only_smoke_names_the_next_one(
    tier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = report({})
    print_summary(replace(made.header, tier=tier), made.results, problems=(), interrupted=False, code=0)
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith(f"CONFORMANT ({tier}): ")
    assert text.count("--tier core") == (1 if tier == "smoke" else 0)
    assert text.count("emulated") == 1


def test_the_record_and_the_pages_have_it(tmp_path: Path) -> None:
    made = report(LEFT)
    record = Record(tmp_path / "out.json", made.header)
    record.finish(1)
    jsonschema.validate(json.loads((tmp_path / "out.json").read_text()), schema())
    assert read_report(tmp_path / "out.json").header == made.header
    assert LINE in html_page(made)
    assert "not tried: head dim 96, 512; more than" in markdown_summary(made)
    for page in (html_page(report({})), markdown_summary(report({}))):
        assert "not covered" not in page


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    Record(tmp_path / "out.json", report(LEFT).header).finish(1)
    data: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    del data["header"]["not_covered"]
    data = of_an_earlier_version(data)
    jsonschema.validate(data, schema())
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert read_report(tmp_path / "old.json").header.not_covered == {}


def test_results_print_it() -> None:
    for not_covered, shown in ((LEFT, True), ({}, False)):
        found = report(not_covered)
        results = Results(found.header, tuple(found.results))
        assert ("; not tried: head dim 96, 512; more than 7 of 64 query rows" in results.verdict) is shown
        assert "not covered" not in str(results), "the verdict names them"


def test_a_plan_counts_what_its_cases_leave_of_the_modes_it_runs() -> None:
    spec = "attn_testkit.examples:MinimalBackend"
    (smoke,) = plan_run(backends=[spec], tier="smoke", device="cpu").header.not_covered.values()
    (core,) = plan_run(backends=[spec], tier="core", device="cpu").header.not_covered.values()
    assert any(phrase.startswith("more than") and "query rows" in phrase for phrase in smoke)
    assert core == (
        "more than 66,001 of 1,048,576 tokens of context",
        "more than 520 of 1,048,576 new tokens of a request (extend)",
    )
    (decode,) = plan_run(backends=[spec], tier="smoke", device="cpu", modes=["decode"]).header.not_covered.values()
    assert not any("rows" in phrase or "(" in phrase for phrase in decode)


def test_of_cases_that_were_named_by_hand_nothing_is_counted() -> None:
    spec = "attn_testkit.examples:MinimalBackend"
    assert plan_run(backends=[spec], device="cpu", cases=["decode-*"]).header.not_covered == {}


@pytest.mark.parametrize("deselected", [0, 3])
def test_what_pytest_deselects_is_not_tried_either(deselected: int) -> None:
    plan = fake_runner.plan_run(backends=[SPEC])
    plan = replace(plan, header=replace(plan.header, not_covered=LEFT))
    request = Request((Candidate(SPEC),))
    judge = fake_runner.Runner(None)  # type: ignore[arg-type]
    session = Session(request, prepared=Prepared(request, plan, plan.items, (), Ledger((), plan.header), judge))
    session.begin([f"test[{param_id(item, request.candidates)}]" for item in plan.items[deselected:]])
    assert session.header is not None
    more = (f"what {deselected} deselected case-runs cover",) if deselected else ()
    assert session.header.not_covered == {SPEC: (*LEFT[SPEC], *more)}
