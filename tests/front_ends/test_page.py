"""What a page shows of a record: every number of its tables, what is cut and by how much, and what its plots draw."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import nights
import pytest

from attn_testkit.reports.check_matrix import check_matrices
from attn_testkit.reports.embedded import embedded_runs
from attn_testkit.reports.history import Age, History, night_of
from attn_testkit.reports.overview import Cell, overviews
from attn_testkit.reports.page import (
    MOST_CARDS,
    MOST_IN_FULL,
    MOST_LINES,
    MOST_NAMED,
    MOST_NIGHTS,
    MOST_OF_A_CAUSE,
    age_words,
    cards,
    dtype_of,
    issue_splits,
    shares,
    size_text,
)
from attn_testkit.reports.render import html_page, markdown_summary
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.failure_text import repro_command
from attn_testkit.results.names import NOT_STARTED

PASSED = CaseResult("b", "decode", "eager", "decode-a", Status.PASSED, device="cuda", margin=0.25)


def of(status: Status, **more: object) -> CaseResult:
    return replace(PASSED, status=status, **more)  # type: ignore[arg-type]


def cells(*results: CaseResult, emulated: bool = False) -> dict[tuple[str, str, str], Cell]:
    (found,) = overviews(results, emulated=emulated)
    return {(row.backend, cell.mode, cell.execution): cell for row in found.rows for cell in row.cells}


def test_a_cell_counts_every_case_run_once_and_its_colour_is_that_of_the_worst():
    statuses = [Status.PASSED, Status.FAILED, Status.CRASHED, Status.TIMED_OUT, Status.UNEXPECTEDLY_PASSED]
    statuses += [Status.KNOWN_FAILURE, Status.QUARANTINED, Status.NOT_RUN_HERE]
    cell = cells(*map(of, statuses))["b", "decode", "eager"]
    assert (cell.passed, cell.red, cell.known, cell.missing, cell.declared) == (1, 4, 2, 1, 8)
    assert cell.words == "1 passed, 4 did not pass, 2 known failures, 1 did not run"
    worst = {
        (Status.PASSED,): "passed",
        (Status.PASSED, Status.KNOWN_FAILURE): "known",
        (Status.PASSED, Status.KNOWN_FAILURE, Status.NOT_RUN_HERE): "missing",
        (Status.PASSED, Status.NOT_RUN_HERE, Status.CRASHED): "red",
    }
    for present, kind in worst.items():
        assert cells(*map(of, present))["b", "decode", "eager"].kind == kind


def test_the_margin_of_a_cell_is_the_largest_of_those_that_passed():
    found = cells(
        PASSED, of(Status.PASSED, margin=0.75), of(Status.FAILED, margin=56.0), of(Status.PASSED, margin=None)
    )
    assert found["b", "decode", "eager"].margin == 0.75
    assert cells(of(Status.FAILED, margin=2.0))["b", "decode", "eager"].margin is None


def test_a_mode_that_did_not_run_says_why_and_one_that_is_not_declared_is_no_failure():
    found = cells(
        PASSED,
        of(Status.UNSUPPORTED, execution="graph", case="", reason="not declared", device=""),
        of(Status.NOT_RUN_HERE, mode="target-verify", case="", reason="needs sm100", device=""),
    )
    both = cells(*(of(status, case="", reason="why") for status in (Status.UNSUPPORTED, Status.NOT_RUN_HERE)))
    assert both["b", "decode", "eager"].kind == "absent"
    assert both["b", "decode", "eager"].words == "unsupported: why; not run here: why"
    graph, verify = found["b", "decode", "graph"], found["b", "target-verify", "eager"]
    assert (graph.kind, graph.words) == ("none", "unsupported: not declared")
    assert (verify.kind, verify.words) == ("absent", "not run here: needs sm100")


def test_columns_are_the_modes_as_a_server_meets_them_and_each_has_its_executions():
    mixed = [replace(PASSED, mode=mode, execution=e) for mode, e in (("draft-extend", "graph"), ("decode", "graph"))]
    (found,) = overviews([*mixed, PASSED, replace(PASSED, mode="later")], emulated=False)
    assert found.columns == (("decode", ("eager", "graph")), ("draft-extend", ("graph",)), ("later", ("eager",)))
    assert [cell.starts for cell in found.rows[0].cells] == [True, False, True, True]


def test_backends_come_as_they_were_named_and_others_after_them():
    """What is known without running is recorded first, and that is no order."""
    results = [replace(PASSED, backend=backend) for backend in "xcab"]
    (found,) = overviews(results, emulated=False, backends=["a", "b", "c"])
    assert [row.backend for row in found.rows] == ["a", "b", "c", "x"]


def test_what_was_emulated_in_any_part_stands_apart_from_what_was_real():
    fake = replace(PASSED, backend="fake", kernels="emulated")
    both = [PASSED, replace(PASSED, execution="graph", graph="emulated"), fake]
    real, emulated = overviews(both, emulated=False)
    assert (real.emulated, emulated.emulated) == (False, True)
    assert [row.backend for row in real.rows] == ["b"]
    assert [row.backend for row in emulated.rows] == ["b", "fake"]
    assert sum(cell.declared for overview in (real, emulated) for row in overview.rows for cell in row.cells) == 3


def test_what_did_not_run_stands_with_the_device_of_the_run_and_a_backend_is_never_left_out():
    undeclared = of(Status.UNSUPPORTED, case="", device="")
    lost = of(Status.FAILED, device="", mode="", execution="", case="(no case)")
    for emulated in (False, True):
        (found,) = overviews([undeclared], emulated=emulated)
        assert (found.emulated, [row.backend for row in found.rows]) == (emulated, ["b"])
        (found,) = overviews([lost], emulated=emulated)
        assert (found.emulated, found.rows[0].cells[0].red) == (emulated, 1)
    # Of a backend whose case-runs were all emulated, the real table has nothing but what could not run.
    fake = replace(PASSED, kernels="emulated")
    assert [found.emulated for found in overviews([fake, undeclared], emulated=False)] == [True]
    absent = of(Status.NOT_RUN_HERE, case="", device="")
    assert [found.emulated for found in overviews([fake, absent], emulated=False)] == [False, True]


def test_a_check_that_failed_in_one_mode_of_several_is_counted():
    graph = replace(PASSED, execution="graph", checks=("completes", "finite", "matches-oracle"))
    failed = replace(graph, mode="target-verify", status=Status.FAILED, findings=(nights.window(1),))
    (matrix,) = check_matrices([replace(PASSED, checks=graph.checks), graph, failed])
    assert (matrix.failed, len(matrix.checks)) == (1, 3)
    (matrix,) = check_matrices([graph])
    assert matrix.failed == 0


def red(count: int, words: str, backend: str = "b") -> list[CaseResult]:
    finding = replace(nights.window(1), hint=words)
    return [of(Status.FAILED, backend=backend, case=f"decode-{words}-{n}", findings=(finding,)) for n in range(count)]


def test_what_is_new_comes_first_then_the_largest():
    old, new = [*red(3, "old"), *red(2, "some")], [*red(1, "new"), *red(2, "some")[1:]]
    before = nights.night([*old, *(replace(r, status=Status.PASSED, findings=()) for r in new)])
    some = red(4, "some")
    report = nights.night([*red(3, "old"), *red(1, "new"), *some], "2026-11-21T00:00:00+00:00")
    history = (night_of(replace(before, results=(*red(3, "old"), *red(2, "some")))),)
    found = cards(report, history)
    assert [(card.number, card.group.cause, card.new, card.count) for card in found] == [
        (1, "some", 2, "4 case-runs"),
        (2, "new", 1, "1 case-run"),
        (3, "old", 0, "3 case-runs"),
    ]
    assert [run.result.case for run in found[0].shown] == [
        "decode-some-2",
        "decode-some-3",
        "decode-some-0",
        "decode-some-1",
    ]
    assert [run.number for run in found[0].shown] == [6, 7, 4, 5]
    assert [age_words(card.age) for card in found] == [
        "red since 2026-11-20 or earlier, 2 nights", "new tonight", "red since 2026-11-20 or earlier, 2 nights",
    ]  # fmt: skip


def test_the_same_cause_of_another_backend_is_named():
    found = cards(nights.night([*red(2, "one", "a"), *red(1, "one", "b"), *red(1, "two", "b")]), ())
    assert [(card.number, card.group.backend, card.group.cause, card.elsewhere) for card in found] == [
        (1, "a", "one", (("b", 2),)),
        (2, "b", "one", (("a", 1),)),
        (3, "b", "two", ()),
    ]


@pytest.mark.parametrize(
    ("sizes", "most", "of_each", "given"),
    [
        ([], 5, 2, []),
        ([3], 5, 2, [2]),
        ([1, 3, 2], 100, 10, [1, 3, 2]),
        ([3, 3, 3], 4, 10, [2, 1, 1]),
        ([3, 3, 3], 3, 10, [1, 1, 1]),
        ([3, 3, 3], 2, 10, [1, 1, 0]),
        ([9, 1, 9], 6, 3, [3, 1, 2]),
        ([9, 1, 9], 7, 3, [3, 1, 3]),
        ([9, 1, 9], 8, 3, [3, 1, 3]),
    ],
)
def test_one_of_each_cause_is_shown_in_full_before_a_second_of_any(sizes, most, of_each, given):
    assert shares(sizes, most, of_each) == given


def test_a_large_cause_is_cut_and_the_page_says_by_how_much():
    for count, more in ((MOST_OF_A_CAUSE + MOST_NAMED, 0), (MOST_OF_A_CAUSE + MOST_NAMED + 1, 1)):
        report = nights.night(red(count, "one"))
        (card,) = cards(report, ())
        assert (len(card.shown), len(card.named), card.more) == (MOST_OF_A_CAUSE, MOST_NAMED, more)
        assert (f"And {more} more" in html_page(report)) is (more > 0)


@pytest.mark.parametrize("count", [MOST_CARDS, MOST_CARDS + 1])
def test_of_very_many_causes_the_last_have_a_line_each_and_links_to_them_hold(count):
    words = ["".join(chr(97 + int(digit)) for digit in str(number)) for number in range(count)]
    report = nights.night([result for word in words for result in red(1, word)])
    page = html_page(report)
    assert page.count("<article") == MOST_CARDS
    assert page.count('<li id="cause-') == count - MOST_CARDS
    assert page.count('<div class="repro">') == MOST_CARDS <= MOST_IN_FULL
    assert all(f'id="cause-{number}"' in page for number in range(1, count + 1))
    assert f"{count} causes" in page


def test_a_red_cell_links_to_the_first_of_its_causes():
    results = [*red(1, "one", "a"), *red(5, "two", "b"), *(replace(r, execution="graph") for r in red(2, "one", "b"))]
    page = html_page(nights.night(results))
    found = re.findall(
        r'data-backend="(\w)" [^>]*data-execution="(\w+)"[^>]*>\s*<a href="#cause-(\d)">✗ (\d)</a>', page
    )
    assert found == [("a", "eager", "3", "1"), ("b", "eager", "1", "5"), ("b", "graph", "2", "2")]
    both = html_page(nights.night([*red(5, "two", "b"), *red(1, "one", "b")]))
    assert "<small>2 causes</small>" in both


def embedded(report) -> dict:
    return json.loads(embedded_runs(report.results, report.header, cards(report, ())))


def test_the_list_of_case_runs_holds_them_all_and_gives_their_repro():
    report = nights.red_night(120, every=6)
    # The last of its backend and execution: the command for all of these is not its own.
    after = replace(report.results[29], after=("eager:decode-x",), status=Status.FAILED, findings=(nights.window(2),))
    report = replace(report, results=(*report.results[:29], after, *report.results[30:]))
    data, runs = embedded(report), [result for result in report.results if result.case]
    assert {len(column) for column in data["runs"].values()} == {len(runs)}
    for number, run in enumerate(runs):
        for name in ("backend", "mode", "execution", "case", "status"):
            assert data["words"][name][data["runs"][name][number]] == getattr(run, name)
        place = f"{run.backend} {run.execution}"
        command = data["own_repro"].get(str(number)) or data["repro"][place].replace("{case}", run.case)
        assert command == repro_command(run, report.header)
        card = data["runs"]["card"][number]
        assert bool(card) is (run.status in (Status.FAILED, Status.CRASHED))
        assert str(card) in data["causes"] or not card
    assert list(data["own_repro"]) == ["29"]
    assert len(set(data["words"]["case"])) == len(data["words"]["case"])


def test_numbers_of_the_list_are_short_and_json_has_no_infinity():
    odd = [replace(PASSED, margin=1 / 3, seconds={"a": 0.1, "b": 0.02468}), of(Status.FAILED, margin=float("inf"))]
    runs = embedded(nights.night([*odd, replace(PASSED, margin=None)]))["runs"]
    assert runs["margin"] == [0.333, "inf", None]
    assert runs["seconds"] == [0.125, 0, 0]


def test_nothing_in_the_list_can_end_its_element():
    report = nights.night([replace(PASSED, backend="</script><!--", case="decode-&lt;")])
    text = embedded_runs(report.results, report.header, [])
    assert not {"<", ">", "&"} & set(text)
    assert json.loads(text)["words"]["backend"] == ["</script><!--"]
    assert html_page(report).count("</script>") == 3


def test_a_page_of_twenty_thousand_case_runs_is_of_a_size_that_opens():
    assert len(html_page(nights.red_night(20_000)).encode()) < 1_000_000


def test_a_summary_names_causes_and_what_changed():
    before, tonight = nights.green_night(200), nights.red_night(200, every=10)
    text = markdown_summary(tonight, before, History((night_of(before),)))
    causes = re.findall(r"<summary>(.*)</summary>", text)
    assert causes[0].startswith("5 case-runs: the first 6 KV tokens are missing")
    assert causes[0].endswith("(matches-oracle, triton) <b>new tonight</b>")
    assert len(causes) == 3
    assert text.count("<details open>") == 1
    assert "Since the previous night (2026-11-20 02:17): 11 newly failing, 0 vanished" in text
    assert "Since" not in markdown_summary(tonight)


def test_known_failures_and_the_narrowest_name_their_backend_and_issues_are_links():
    page = html_page(nights.red_night(400))
    assert '<a href="https://example.org/issues/12">https://example.org/issues/12</a>' in page
    for title in ("Known failures", "Closest to the limit", "Slowest"):
        section = page[page.index(f">{title}</h2>") :]
        assert "<th>backend</th>" in section[: section.index("</thead>")]
    assert issue_splits("see https://a.b/c; later") == [("see ", False), ("https://a.b/c", True), ("; later", False)]


@pytest.mark.parametrize(("count", "more"), [(MOST_LINES, 0), (MOST_LINES + 1, 1)])
def test_a_long_table_is_cut_and_says_by_how_much(count, more):
    results = [of(Status.KNOWN_FAILURE, case=f"decode-{n}", reason="issue") for n in range(count)]
    page = html_page(nights.night([PASSED, *results]))
    table = page[page.index(">Known failures</h2>") :]
    assert table[: table.index("</table>")].count("<tr data-line") == MOST_LINES == 100
    assert (f"And {more} more." in page) is (more > 0)


def lines_of(page: str, title: str) -> list[str]:
    """The first cell of each row of a table."""
    section = page[page.index(f">{title}</h2>") :]
    return re.findall(r'<tr data-line[^>]*><td class="num \w+">([^<]*)<', section[: section.index("</table>")])


def test_the_nearest_to_the_limit_passed_and_the_slowest_ran():
    results = [replace(PASSED, margin=n / 100, seconds={"eager": n / 10}) for n in range(12)]
    results += [of(Status.FAILED, margin=56.0, seconds={"eager": 3.0}), of(Status.QUARANTINED, margin=None)]
    page = html_page(nights.night([*results, replace(PASSED, margin=None)]))
    assert lines_of(page, "Closest to the limit") == [f"{n / 100:.3f}" for n in range(11, 3, -1)]
    assert lines_of(page, "Slowest") == ["3.00", *(f"{n / 10:.2f}" for n in range(11, 4, -1))]


def test_margins_have_a_plot_for_each_backend_and_a_line_for_each_mode_and_dtype():
    page = html_page(nights.green_night(400))
    assert page.count('<svg class="plot margins"') == len(nights.BACKENDS)
    figure = page[page.index('<svg class="plot margins"') :]
    names = re.findall(r"<title>([^:]*): (\d+) passed", figure[: figure.index("</svg>")])
    dtypes = ["bf16", "bf16, KV fp8e4m3", "fp16", "fp16, KV fp8e4m3"]
    assert [name for name, _ in names] == [f"{mode} {dtype}" for dtype in dtypes for mode in nights.MODES]
    assert sum(int(count) for _, count in names) == 100


def test_what_ran_emulated_is_counted_for_each_backend():
    results = [
        replace(PASSED, backend="a", device="emulated"),
        replace(PASSED, backend="a", kernels="emulated"),
        PASSED,
    ]
    results += [replace(PASSED, backend="a"), of(Status.QUARANTINED, backend="a", device="emulated")]
    page = html_page(nights.night(results))
    section = page[page.index('id="emulated"') :]
    assert re.findall(r"<th class=\"num\">([^<]*)<", section)[:3] == [
        "case-runs that ran", "device emulated", "kernels emulated",
    ]  # fmt: skip
    row = section[section.index("<tbody>") : section.index("</tbody>")]
    assert re.sub(r"<[^>]*>", " ", row).split() == ["a", "3", "1", "1"]


def test_headings_count_what_did_not_pass():
    page = html_page(nights.red_night(400))
    failed = sum(result.status in (Status.FAILED, Status.CRASHED) for result in nights.red_night(400).results)
    assert f"Failures: {failed} case-runs, 3 causes" in page


def test_a_trend_has_a_column_for_each_of_the_last_nights_and_tonight():
    tonight = nights.green_night(8, "2026-11-21T02:17:00+00:00")
    for count, columns in ((1, 2), (59, 60), (MOST_NIGHTS + 1, MOST_NIGHTS + 1)):
        starts = [f"2026-{9 + n // 28:02d}-{n % 28 + 1:02d}T02:17:00+00:00" for n in range(count)]
        history = History(tuple(night_of(nights.green_night(8, started)) for started in starts))
        page = html_page(tonight, None, history)
        figure = page[page.index('<svg class="plot nights"') :]
        assert figure[: figure.index("</svg>")].count("<title>") == columns
        assert f"<title>{starts[-1][:10]}: 2 of 2 passed</title>" in figure
        assert f"Over {columns} nights" in page
        assert f"from {starts[-columns + 1][:10]} to tonight" in page


def test_what_is_declared_and_not_tried_is_said_at_the_top_and_in_full():
    page = html_page(nights.green_night(40))
    assert page.index("not covered: 4 backends") < page.index("<table")
    report = nights.green_night(40)
    left = replace(report.results[0], status=Status.NOT_RUN_HERE, reason=NOT_STARTED, margin=None)
    header = replace(report.header, not_covered={"triton": ("head dim 96",)})
    one = html_page(replace(report, header=header, results=(left, *report.results[1:])))
    assert ">not covered</a>" in one, "what the budget left out is not a backend"
    assert "not covered (triton): head dim 96; group 4" in page


@pytest.mark.parametrize(
    ("age", "words"),
    [
        (None, ""),
        (Age("", 1, or_earlier=False), "new tonight"),
        (Age("2026-11-14T02:17:00+00:00", 5, or_earlier=False), "red since 2026-11-14, 5 nights"),
        (Age("2026-11-14T02:17:00+00:00", 2, or_earlier=True), "red since 2026-11-14 or earlier, 2 nights"),
    ],
)
def test_the_age_of_a_failure_in_words(age, words):
    assert age_words(age) == words


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod", "bf16"),
        ("decode-gqa4x2-d64-fp32-p16-k33-shuffled-gauss-b1prod-s3", "fp32"),
        ("decode-gqa4x2-d64-fp16-p16-k33-shuffled-gauss-kvfp8e4m3-w4-b1prod", "fp16, KV fp8e4m3"),
        ("decode-ok-k0", "other"),
    ],
)
def test_the_dtype_of_a_case_is_read_from_its_id(case, dtype):
    assert dtype_of(case) == dtype


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), ((1 << 20) - 1, "1024.0 KiB"), (1 << 20, "1.0 MiB"),
     (3 << 29, "1.5 GiB"), (-2048, "-2.0 KiB")],
)  # fmt: skip
def test_bytes_in_words(count: int, text: str) -> None:
    assert size_text(count) == text


def test_memory_of_a_mode_is_the_largest_of_its_case_runs_and_growth_is_marked() -> None:
    small = of(Status.PASSED, memory={"persistent": 2048, "peak": 5 << 20, "growth": 0})
    large = of(Status.FAILED, case="decode-b", memory={"persistent": 4096, "growth": 512})
    page = html_page(nights.night([small, large, of(Status.PASSED, case="decode-c")]))
    (row,) = re.findall(r'id="memory".*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    assert re.findall(r'<td class="([^"]*)">([^<]*)</td>', row) == [
        ("num", "4.0 KiB"), ("num", ""), ("num", "5.0 MiB"), ("num bad-number", "512 B"), ("num", "")
    ]  # fmt: skip
    assert 'id="memory"' not in html_page(nights.night([PASSED]))
