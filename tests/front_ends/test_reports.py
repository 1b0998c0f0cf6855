"""Reports: readable at every moment, true to the results, and honest about what was emulated."""

from __future__ import annotations

import contextlib
import json
import resource
from dataclasses import replace
from html.parser import HTMLParser

import fake_runner
import jsonschema
import pytest
from signed import of_an_earlier_version

from attn_testkit.cli.show import print_summary
from attn_testkit.registry import UsageError
from attn_testkit.reports.check_matrix import check_matrices, reading_order
from attn_testkit.reports.compare import compare_reports, comparison_text
from attn_testkit.reports.outcome import verdict
from attn_testkit.reports.overview import overviews
from attn_testkit.reports.page import MOST_NAMED, MOST_OF_A_CAUSE
from attn_testkit.reports.record import Record, Report, plain, read_report, schema
from attn_testkit.reports.render import html_page, markdown_summary
from attn_testkit.reports.tally import rows, text_table
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.failure_text import format_failure
from attn_testkit.results.names import NO_ROOM, NOT_STARTED
from attn_testkit.results.remarks import printed_lines, repeated_lines
from attn_testkit.results.run_header import exit_code


def run_of(words: str, **header) -> Report:
    plan = fake_runner.plan_run(backends=[f"fake:{words}"])
    results = (*plan.preset, *(fake_runner.run_item(item) for item in plan.items))
    head = replace(plan.header, **header)
    return Report(head, results, finished=True, exit_code=exit_code(head.planned, results))


def written(tmp_path, report: Report, name: str = "out.json"):
    record = Record(tmp_path / name, report.header)
    for result in report.results:
        record.add(result)
    record.finish(report.exit_code or 0, problems=report.problems)
    return tmp_path / name


def test_a_record_comes_back_as_it_was_written(tmp_path):
    report = replace(cut_short(run_of("ok,wrong,inf,lost")), problems=("an entry expired",))
    assert read_report(written(tmp_path, report)) == report


def test_the_file_is_whole_after_every_result(tmp_path):
    """A run that is killed leaves what it had; a truncated file would lose the night."""
    report = run_of("ok,wrong")
    record = Record(tmp_path / "out.json", report.header)
    for count, result in enumerate(report.results):
        data = json.loads((tmp_path / "out.json").read_text())
        jsonschema.validate(data, schema())
        assert len(data["results"]) == count
        assert data["finished"] is False
        assert data["exit_code"] is None
        record.add(result)
    record.close()
    assert read_report(tmp_path / "out.json").finished is False


@contextlib.contextmanager
def files_of_at_most(size: int):
    """What a full disk is to a program: a write that comes up short, and then an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 1, 40, 300, 5000])
def test_a_full_disk_leaves_what_was_written_until_then(tmp_path, room):
    report = run_of("ok,wrong,ok,inf")
    record = Record(tmp_path / "out.json", report.header)
    size = (tmp_path / "out.json").stat().st_size
    with files_of_at_most(size + room):
        for result in report.results:
            record.add(result)
        record.finish(0)
    kept = read_report(tmp_path / "out.json")
    assert kept.results == report.results[: len(kept.results)]
    assert len(kept.results) < len(report.results)
    assert (len(kept.results) > 0) is (room >= 300)
    assert not kept.finished
    assert kept.exit_code is None
    assert (
        record.failure == f"{tmp_path / 'out.json'} lacks what came after {len(kept.results)} results: File too large"
    )
    counts = json.loads((tmp_path / "out.json").read_text())["counts"]
    assert sum(counts.values()) == sum(bool(result.case) for result in kept.results)


def test_a_disk_that_has_room_again_does_not_leave_a_hole_in_the_record(tmp_path):
    """A record that lacks results must never look finished."""
    report = run_of("ok,wrong")
    record = Record(tmp_path / "out.json", report.header)
    record.add(report.results[0])
    with files_of_at_most(10):
        record.add(report.results[1])
    record.add(report.results[2])
    record.finish(0)
    kept = read_report(tmp_path / "out.json")
    assert kept.results == report.results[:1]
    assert not kept.finished


def test_a_record_that_fits_says_nothing(tmp_path):
    record = Record(tmp_path / "out.json", run_of("ok").header)
    record.finish(0)
    assert record.failure == ""


@pytest.mark.parametrize("length", [599, 600, 601, 5_000_000])
def test_texts_are_cut_where_they_are_made_with_the_number_of_characters_left_out(length):
    text = ("0123456789" * (length // 10 + 1))[:length]
    found = fake_runner.finding()
    cut = replace(found, headline=text, hint=text).headline
    assert len(cut) <= 600
    assert replace(found, headline=cut).headline == cut, "read back from a record, it is what it was"
    before, _, rest = cut.partition(" [... ")
    number, _, after = rest.partition(" characters left out ...] ")
    if length <= 600:
        assert cut == text
    else:
        assert int(number) + len(before) + len(after) == length
        assert len(cut) > 590
        assert text.startswith(before)
        assert text.endswith(after)


def test_reasons_and_hints_are_cut_too_and_no_text_moves_the_cursor():
    result = replace(
        run_of("lost").results[-1], reason="\x1b[2J" + "x" * 1_000_000, hints=("\ud800" + "y" * 1_000_000,)
    )
    assert len(result.reason) <= 8000
    assert result.reason.startswith("\\x1b[2Jxxx")
    assert len(result.hints[0]) <= 4000
    assert result.hints[0].startswith("\\ud800yyy")
    assert replace(result, reason="a\r\nb\tc").reason == "a\nb\tc"
    html_page(replace(run_of("lost"), results=(result,))).encode()


def test_an_ending_shorter_than_the_last_leaves_no_debris(tmp_path):
    record = Record(tmp_path / "out.json", run_of("ok").header)
    record.finish(1, problems=["x" * 500])
    assert read_report(tmp_path / "out.json").problems == ("x" * 500,)
    record = Record(tmp_path / "out.json", run_of("ok").header)
    record.finish(1)
    assert read_report(tmp_path / "out.json").problems == ()


def test_the_schema_refuses_what_it_does_not_know(tmp_path):
    data = json.loads(written(tmp_path, run_of("ok")).read_text())
    jsonschema.Draft202012Validator.check_schema(schema())
    data["results"][-1]["status"] = "skipped"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema())
    known = set(schema()["$defs"]["status"]["enum"])
    assert known == {status.value for status in Status}


def test_only_plain_values_leave_the_process():
    """execnet refuses subclasses of float and str, and pytest then exits 0 without the test."""

    class Float(float):
        pass

    found = plain({Status.PASSED: (Float(1.5), Status.FAILED, True, None, float("nan"), object)})
    assert found == {"passed": [1.5, "failed", True, None, "nan", str(object)]}
    assert {type(value) for value in found["passed"]} == {float, str, bool, type(None)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "is not JSON: .*; expected a results file, which `attn-testkit run --json FILE` writes"),
        ("[]", "is not a results file of attn-testkit; .*; expected a results file, which"),
        ('{"format": "attn-testkit-report/9"}', "has format 'attn-testkit-report/9'; this kit reads attn-testkit-rep"),
        ('{"format": "attn-testkit-report/1", "header": {}}', "is damaged"),
    ],
)
def test_a_file_that_is_no_record_is_one_line(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_report(tmp_path / "x.json")


class Page(HTMLParser):
    """Checks that tags close, and keeps the visible text."""

    void = ("meta", "br", "wbr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.outside: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)
        self.outside += [value for name, value in attrs if name in ("src", "href") and not value.startswith("#")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & {*self.open}:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_needs_nothing_else_and_tells_failures_before_tables():
    page = Page(html_page(run_of("ok,wrong")))
    assert page.outside == []
    text = page.text
    assert text.index("only requests with a partly") < text.index("By mode and execution") < text.index("Checks")
    assert "attn-testkit repro --backend fake:ok,wrong --execution graph --device cpu decode-wrong-k1" in text
    assert "✗ 1/2" in text
    assert "✓ 2" in text


def cut_short(report: Report) -> Report:
    """Its last result failed in the constructor, so that all else could not be judged."""
    finding = replace(fake_runner.finding("completes"), headline="the constructor raised OSError: no library")
    last = replace(
        report.results[-1],
        status=Status.FAILED,
        findings=(finding,),
        checks=("completes",),
        not_evaluated=("matches-oracle", "finite", "writes-own-kv"),
    )
    return replace(report, results=(*report.results[:-1], last))


def test_what_could_not_be_evaluated_is_shown_apart_and_never_as_kept():
    report = cut_short(run_of("ok"))
    mode, execution = report.results[-1].mode, report.results[-1].execution
    (matrix,) = check_matrices([result for result in report.results if result.case])
    (row,) = (row for row in matrix.rows if (row.mode, row.execution) == (mode, execution))
    kinds = dict(zip(matrix.checks, (cell.kind for cell in row.cells), strict=True))
    assert kinds == {
        "completes": "failed",
        "matches-oracle": "untested",
        "finite": "untested",
        "writes-own-kv": "untested",
    }
    text = Page(html_page(report)).text
    assert "? 1" in text
    assert "? not evaluated, because" in text


def test_what_was_evaluated_in_some_case_runs_and_not_in_others_shows_both_numbers():
    report = run_of("ok,ok")
    page = Page(html_page(cut_short(report))).text
    assert "✓ 1 ? 1" in page
    assert "✓ 2" in page


def test_the_text_names_a_few_checks_that_were_not_evaluated_and_counts_many():
    result = cut_short(run_of("ok")).results[-1]
    assert "  untested matches-oracle, finite, writes-own-kv" in format_failure(result).splitlines()
    many = replace(result, not_evaluated=tuple(f"check-{n}" for n in range(1, 9)))
    assert "  untested check-1, check-2, check-3, check-4, check-5 and 3 more" in format_failure(many).splitlines()
    six = replace(result, not_evaluated=many.not_evaluated[:6])
    assert "  untested check-1, check-2, check-3, check-4, check-5, check-6" in format_failure(six).splitlines()
    assert "untested" not in format_failure(replace(result, not_evaluated=()))


def test_a_record_of_a_version_that_did_not_know_what_was_not_evaluated_is_read(tmp_path):
    path = written(tmp_path, run_of("ok,wrong"))
    data = json.loads(path.read_text())
    for result in data["results"]:
        assert result.pop("not_evaluated") == []
    data = of_an_earlier_version(data)
    path.write_text(json.dumps(data))
    jsonschema.validate(data, schema())
    assert read_report(path).results == run_of("ok,wrong").results


def test_columns_come_in_the_order_in_which_results_list_their_checks():
    long, short = (
        ("completes", "finite", "padding-inert", "capabilities-honest"),
        ("finite", "steps", "capabilities-honest", "x"),
    )
    first = run_of("ok").results[-1]
    results = [replace(first, checks=short), replace(first, checks=long[:2], not_evaluated=long)]
    order = reading_order(results)
    assert order == ("completes", "finite", "padding-inert", "steps", "capabilities-honest", "x")
    assert reading_order(results[::-1]) == order


def test_what_was_emulated_is_labelled_on_page_and_summary():
    report = run_of("ok")
    emulated = replace(report.results[-1], kernels="emulated")
    report = replace(report, results=(*report.results[:-1], emulated))
    text = Page(html_page(report)).text
    assert "emulated device, graph, kernels: no proof about hardware" in text
    assert "prove nothing about hardware" not in text, "the verdict says it"
    assert "emulated: device, graph, kernels" in text
    assert "timing is not emulated" in text
    summary = markdown_summary(report)
    assert "emulated device, graph, kernels: no proof about hardware" in summary
    red = run_of("wrong")
    assert "Emulated: device, graph. Results with this tag prove nothing about hardware." in Page(html_page(red)).text
    assert "**Emulated: device, graph.** This proves nothing about hardware." in markdown_summary(red)
    real = replace(
        report, results=tuple(replace(r, device="cuda", graph="cuda", kernels="real") for r in report.results)
    )
    assert "mulated" not in Page(
        html_page(replace(real, header=replace(real.header, device="cuda", limits=())))
    ).text.replace("(emulated CUDA)", "")


def test_text_from_a_backend_cannot_become_markup():
    report = run_of("ok,wrong")
    evil = replace(report.results[-1], reason="<script>alert(1)</script>", status=Status.CRASHED, findings=())
    assert "<script>alert" not in html_page(replace(report, results=(*report.results, evil)))
    note = CaseResult("a|b", "decode", "graph", "", Status.NOT_RUN_HERE, reason="x|y")
    assert "a\\|b" in markdown_summary(replace(report, results=(note,)))


@pytest.mark.parametrize("problems", [(), ("an entry matches no case",)])
@pytest.mark.parametrize("not_covered", [{}, {"fake:ok": ("page size 64",)}])
def test_the_table_of_a_summary_stands_by_itself(problems: tuple[str, ...], not_covered: dict[str, tuple[str, ...]]):
    """A row right below an item of a list belongs to the item, and is no table."""
    report = run_of("ok")
    report = replace(report, problems=problems, header=replace(report.header, not_covered=not_covered))
    lines = markdown_summary(report).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| backend"))
    assert lines[first - 1] == ""
    assert any(line.startswith("- ") for line in lines[:first]) == bool(problems), (
        "the verdict names what was not tried"
    )


def test_a_run_that_was_cut_off_never_looks_finished():
    report = replace(run_of("ok"), finished=False, exit_code=None)
    page = html_page(report)
    assert "INCOMPLETE: the run was cut off" in page
    assert "<title>✗" in page
    assert markdown_summary(report).startswith("### ❌ INCOMPLETE")


def test_a_page_of_many_failures_stays_small():
    report = run_of(",".join(["wrong"] * 200))
    page = html_page(report)
    text = Page(page).text
    assert "800 case-runs : only requests with a partly filled last page are wrong" in text
    assert page.count('<div class="repro">') == MOST_OF_A_CAUSE
    assert page.count('<button type="button" class="script" data-run=') == MOST_NAMED
    assert f"And {800 - MOST_OF_A_CAUSE - MOST_NAMED} more" in page
    assert len(page) < 300_000


def test_the_comparison_names_what_got_worse():
    old, new = run_of("ok,wrong,ok"), run_of("ok,wrong,ok")
    assert compare_reports(old, new).exit_code == 0
    broken = {r.case: r for r in run_of("wrong").results}
    worse = tuple(
        replace(r, status=Status.FAILED, findings=broken["decode-wrong-k0"].findings) if r.case == "decode-ok-k0" else r
        for r in new.results
    )
    found = compare_reports(old, replace(new, results=worse))
    assert [change.case for change in found.newly_failing] == ["decode-ok-k0"] * 2
    assert found.exit_code == 1
    text = comparison_text(found)
    assert "request 3 differs from the oracle" in text
    assert text.splitlines()[-1].startswith("WORSE: 2 newly failing, 0 vanished")
    assert len(compare_reports(replace(old, results=worse), new).newly_passing) == 2


def test_coverage_that_shrinks_by_itself_is_worse():
    old = run_of("ok,ok")
    new = replace(old, results=old.results[:-1])
    assert len(compare_reports(old, new).vanished) == 1
    skipped = replace(old.results[-1], status=Status.NOT_RUN_HERE)
    found = compare_reports(old, replace(old, results=(*old.results[:-1], skipped)))
    assert len(found.vanished) == 1
    assert found.exit_code == 1


def test_what_a_budget_left_out_has_not_vanished():
    old = run_of("ok,ok")
    left = replace(old.results[-1], status=Status.NOT_RUN_HERE, reason=f"{NOT_STARTED}the budget of 5 s was over")
    found = compare_reports(old, replace(old, results=(*old.results[:-1], left)))
    assert [(change.case, change.new) for change in found.not_reached] == [(left.case, "not reached")]
    assert not found.vanished
    assert found.exit_code == 0
    text = comparison_text(found)
    assert "the new run's budget left no time for 1 of the old run's case-runs" in text
    assert text.splitlines()[-1].startswith("not worse")
    assert not compare_reports(replace(old, results=(*old.results[:-1], left)), old).not_reached


def test_a_margin_that_shrank_is_reported_and_is_no_failure():
    old = run_of("ok")
    grown = tuple(replace(r, margin=0.7) if r.margin else r for r in old.results)
    found = compare_reports(old, replace(old, results=grown))
    assert len(found.shrunk_margins) == 4
    assert found.exit_code == 0
    assert "0.400 -> 0.700" in comparison_text(found)
    on_hardware = tuple(replace(r, device="cuda") for r in grown)
    assert not compare_reports(old, replace(old, results=on_hardware)).shrunk_margins


def test_the_comparison_says_when_the_runs_are_not_alike():
    old = run_of("ok")
    new = run_of("ok", device_name="NVIDIA H200 sm90", versions={"python": "3.11", "torch": "2.14.0"})
    assert compare_reports(old, new).remarks == (
        "device differs: CPU (emulated CUDA) -> NVIDIA H200 sm90",
        "torch 2.13.0 -> 2.14.0",
    )


def test_runs_with_other_seeds_are_compared_case_by_case():
    def seeded(seed: int, *words: str) -> Report:
        report = run_of(",".join(words), seed=seed)
        ids = (replace(r, case=f"{r.case}-s{seed}") if r.case and seed else r for r in report.results)
        return replace(report, results=tuple(ids))

    found = compare_reports(seeded(0, "ok", "ok"), seeded(7, "ok", "ok"))
    assert found.exit_code == 0
    assert not found.vanished + found.appeared
    assert found.remarks == ("seeds differ: 0 -> 7; case-runs are compared by their ids without the seed",)
    new = seeded(8, "ok")
    broken = (replace(r, status=Status.FAILED) if r.case and r.execution == "graph" else r for r in new.results)
    found = compare_reports(seeded(7, "ok"), replace(new, results=tuple(broken)))
    assert {(change.case, change.old, change.new) for change in found.newly_failing} == {
        ("decode-ok-k0-s8", "passed", "failed"),
        ("target-verify-ok-k0-s8", "passed", "failed"),
    }
    same = seeded(7, "ok")
    assert compare_reports(same, same).remarks == ()


def test_the_verdict_always_has_its_denominator():
    report = run_of("ok,ok")
    assert verdict(report.header, report.results).startswith(
        "CONFORMANT (smoke): 8 of 8 planned case-runs passed; emulated"
    )
    assert verdict(report.header, report.results[:-1]) == "INCOMPLETE: 7 of 8 planned case-runs ran"
    assert verdict(report.header, ()) == "INCOMPLETE: 0 of 8 planned case-runs ran"
    assert verdict(replace(report.header, planned=0), report.results[:2]).startswith("NOTHING RAN")
    assert verdict(report.header, report.results, problems=["x expired"]).startswith("NOT CONFORMANT")


def test_a_named_case_that_is_not_declared_is_no_verdict_on_the_backend():
    passed = CaseResult("b", "decode", "eager", "c", Status.PASSED)
    undeclared = replace(passed, case="d", status=Status.UNSUPPORTED, reason="not declared: heads mha2")
    header = replace(run_of("ok").header, planned=1)
    assert exit_code(1, [passed, undeclared]) == 0
    assert verdict(header, [passed, undeclared]).startswith("CONFORMANT (smoke): 1 of 1 planned case-runs passed")
    assert exit_code(0, [undeclared]) == 5
    text = "NOTHING RAN: no backend declares what the selected cases need; not declared: heads mha2"
    assert verdict(replace(header, planned=0), [undeclared, undeclared]) == text
    another = replace(undeclared, reason="not declared: dtype fp16")
    assert verdict(replace(header, planned=0), [undeclared, another]) == f"{text}, dtype fp16"
    absent = replace(passed, case="", status=Status.NOT_RUN_HERE, reason="needs SM100")
    assert verdict(replace(header, planned=0), [undeclared, absent]) == f"{text}; not runnable here: needs SM100"


def test_green_requires_that_something_ran_and_nothing_is_missing():
    passed, quarantined = (CaseResult("b", "decode", "eager", "c", s) for s in (Status.PASSED, Status.QUARANTINED))
    skipped = replace(passed, status=Status.NOT_RUN_HERE)
    assert exit_code(1, [passed]) == 0
    assert exit_code(2, [passed]) == 1
    assert exit_code(2, [passed, skipped]) == 1
    assert exit_code(2, [passed, quarantined]) == 0
    assert exit_code(1, [quarantined]) == 1
    assert exit_code(0, []) == 5
    assert exit_code(1, [passed], interrupted=True) == 2


def test_what_a_machine_has_no_room_for_is_reported_and_costs_no_verdict():
    passed = CaseResult("b", "decode", "eager", "c", Status.PASSED)
    no_room = replace(passed, status=Status.NOT_RUN_HERE, reason=f"{NO_ROOM}for a KV pool")
    assert exit_code(2, [passed, no_room]) == 0
    assert exit_code(3, [passed, no_room]) == 1
    assert exit_code(1, [no_room]) == 1, "nothing is known to work"
    assert exit_code(2, [passed, replace(no_room, reason="another")]) == 1
    header = replace(run_of("ok").header, planned=2)
    text = verdict(header, [passed, no_room])
    assert text.startswith("CONFORMANT (smoke): 1 of 2 planned case-runs passed, 1 not run here for lack of memory")
    assert verdict(replace(header, planned=3), [passed, no_room]) == "INCOMPLETE: 1 of 3 planned case-runs ran"


def test_the_table_has_the_modes_in_a_servers_order():
    found = rows(run_of("ok").results)
    assert [(row.mode, row.execution) for row in found][:3] == [
        ("decode", "eager"),
        ("decode", "graph"),
        ("target-verify", "eager"),
    ]
    assert found[-1].note == "not run here: needs sm100"
    assert all(line == line.rstrip() for line in text_table(run_of("ok").results))


def test_a_crash_is_reported_with_its_command_too():
    report = run_of("lost")
    crash = next(r for r in report.results if r.status is Status.CRASHED and r.execution == "graph")
    lines = format_failure(crash, report.header).splitlines()
    assert lines[0] == "decode-lost-k0: crashed: CUDA error: an illegal memory access was encountered"
    assert lines[-1].endswith("repro --backend fake:lost --execution graph --device cpu decode-lost-k0")


def test_a_long_hint_fits_the_line_and_values_stay_whole():
    finding = replace(fake_runner.finding(), hint="look here " * 40 + "\nand there", where="x" * 300)
    result = replace(run_of("wrong").results[-1], findings=(finding,))
    lines = format_failure(result).splitlines()
    hints = lines[next(i for i, line in enumerate(lines) if line.startswith("  hint")) :]
    assert all(len(line) <= 120 for line in hints if "repro" not in line)
    assert [line[:11] for line in hints[:5]] == ["  hint     ", " " * 11, " " * 11, " " * 11, "  hint     "]
    assert "x" * 300 in format_failure(result)


def test_a_failure_of_a_multi_mode_instance_counts_under_the_mode_that_failed():
    right = CaseResult("b", "decode", "eager", "decode-a", Status.PASSED)
    failed = replace(right, case="decode-b-multi_mode", status=Status.FAILED, failed_mode="draft-extend-v2")
    counts = {row.mode: dict(row.counts) for row in rows([right, failed])}
    assert counts == {"decode": {Status.PASSED: 1}, "draft-extend-v2": {Status.FAILED: 1}}
    (overview,) = overviews([right, failed], emulated=True)
    assert {cell.mode: (cell.passed, cell.red) for cell in overview.rows[0].cells} == {
        "decode": (1, 0),
        "draft-extend-v2": (0, 1),
    }


def test_what_the_backend_printed_is_shown_with_its_failure_and_counted():
    printed = "\n".join(f"line {n}" for n in range(8)) + "\n"
    failed = CaseResult("b", "decode", "eager", "decode-a", Status.FAILED, printed=printed)
    shown = [line for line in format_failure(failed).splitlines() if line.startswith("  printed")]
    assert shown == ["  printed  (2 earlier lines)", *(f"  printed  line {n}" for n in range(2, 8))]
    assert printed_lines([failed, replace(failed, printed="")])[0].startswith(
        "printed by the backend: 8 lines in 1 case-run;"
    )
    assert printed_lines([replace(failed, printed="\n")]) == []


def test_repeated_case_runs_are_counted_by_what_ended():
    right = CaseResult("b", "decode", "eager", "decode-a", Status.PASSED)
    how = ("", "the judge died", "a lane died\n  last words", "the judge died")
    rows = [replace(right, repeated=each) for each in how]
    assert repeated_lines(rows) == [
        "repeated, since a process of the kit ended in the middle of them: 2: the judge died; 1: a lane died"
    ]
    assert repeated_lines(rows[:1]) == []


def test_terminal_and_pages_name_what_is_not_declared_in_one_wording(capsys):
    def absent(mode: str, execution: str) -> CaseResult:
        return CaseResult("b", mode, execution, "", Status.UNSUPPORTED, reason="not declared")

    table = [CaseResult("b", "decode", "eager", "decode-a", Status.PASSED), absent("extend", "eager")]
    table += [absent("extend", "graph"), absent("decode", "graph")]
    assert [line.split()[:2] for line in text_table(table)[1:]] == [["decode", "eager"]]
    run = run_of("ok", not_declared={"b": ("graph for decode", "extend")})
    report, want = replace(run, results=tuple(table)), "not declared: graph for decode; extend"
    print_summary(report.header, table, problems=[], interrupted=False, code=0)
    for text in (capsys.readouterr().out, Page(html_page(report)).text, markdown_summary(report)):
        assert text.count("not declared:") == text.count(want) == 1
    all_declared = replace(report, header=replace(report.header, not_declared={}))
    assert not any("not declared:" in page(all_declared) for page in (html_page, markdown_summary))
