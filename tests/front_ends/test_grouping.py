"""Failures grouped by cause: what is one bug is one group, and nothing is in two, in none, or in another's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_testkit.reports.grouping import Causes, Group, group_failures, without_numbers
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding

NUMBER = "request {n} differs from the oracle, {n}x over the limit"


def wrong(
    hint: str = "", n: int = 1, *, headline: str = NUMBER, check: str = "matches-oracle", where: str = ""
) -> Finding:
    return Finding(check, headline.format(n=n), hint=hint, where=where)


def failed(*findings: Finding, backend: str = "triton", case: str = "decode-a", **more: object) -> CaseResult:
    return CaseResult(backend, "decode", "eager", case, Status.FAILED, findings, **more)  # type: ignore[arg-type]


def crashed(reason: str, status: Status = Status.CRASHED) -> CaseResult:
    return CaseResult("triton", "decode", "eager", "decode-a", status, reason=reason)


def causes(*results: CaseResult) -> list[tuple[int, str]]:
    return [(len(group.results), group.cause) for group in group_failures(results)]


MISSING = "the first {} missing: the start of a window, or an offset into the table"


def test_the_same_cause_with_other_numbers_is_one_group_and_is_named_with_those_of_the_first():
    one, many = MISSING.format("KV token is"), MISSING.format("17 KV tokens are")
    assert causes(failed(wrong(one)), failed(wrong(one, 2))) == [(2, one)]
    assert causes(failed(wrong(many)), failed(wrong(one, 2)), failed(wrong(many))) == [(3, many)]


def test_other_backends_and_statuses_are_other_groups_and_another_check_is_not():
    hint = MISSING.format("KV token is")
    found = group_failures(
        [
            failed(wrong(hint)),
            failed(wrong(hint), backend="flashinfer"),
            failed(wrong(hint, check="finite")),
            crashed("gone"),
            crashed("gone", Status.TIMED_OUT),
        ]
    )
    assert [(group.backend, group.check) for group in found] == [
        ("triton", "matches-oracle"),
        ("flashinfer", "matches-oracle"),
        ("triton", "crashed"),
        ("triton", "timed out"),
    ]


def test_the_largest_group_comes_first_and_results_keep_their_order():
    results = [failed(wrong(hint), case=f"decode-{i}") for i, hint in enumerate(["a", "b", "b", "c", "b"])]
    found = group_failures(results)
    assert [(group.cause, [r.case for r in group.results]) for group in found] == [
        ("b", ["decode-1", "decode-2", "decode-4"]),
        ("a", ["decode-0"]),
        ("c", ["decode-3"]),
    ]


def test_the_line_that_most_share_names_the_group_wherever_it_stands():
    """Which pattern is shown first depends on a case's shapes."""
    first, second, third = failed(wrong("odd\nshared")), failed(wrong("shared")), failed(wrong("other\nmore\nshared"))
    assert causes(first, second, third) == [(3, "shared")]


def test_a_note_on_the_case_is_no_cause_and_joins_no_two_failures():
    note = "in this case the next step is planned early"
    assert causes(failed(wrong(f"odd\n{note}")), failed(wrong(f"other\n{note}"))) == [(1, "odd"), (1, "other")]
    assert causes(failed(wrong(note))) == [(1, NUMBER.format(n=1))]
    assert len(causes(failed(wrong(note)), failed(wrong(note, check="finite", headline="request {n} has nan")))) == 2


def test_a_second_hint_names_no_cause_and_joins_no_two_failures():
    """The second hint about a NaN is the same for every cause."""
    general = "no foreign memory is read: 0 / 0"
    one, other = failed(wrong(f"the last key is missing\n{general}")), failed(wrong(f"wrong page\n{general}"))
    assert causes(one, other) == [(1, "the last key is missing"), (1, "wrong page")]
    assert causes(one, failed(wrong("the last key is missing"))) == [(2, "the last key is missing")]
    assert causes(failed(wrong("telling\ngeneral")), failed(wrong("x\ntelling\ny\ngeneral"))) == [(2, "telling")]


def test_the_best_hint_of_one_failure_among_the_hints_of_another_makes_them_one():
    results = [failed(wrong(h)) for h in ("a\nb", "a\nc", "a", "b\nd", "e\nd")]
    assert causes(*results) == [(4, "a"), (1, "e")]


def test_a_failure_that_the_run_took_to_be_like_another_is_in_its_group_whatever_it_shows():
    first = failed(wrong("a"), case="decode-a")
    alike = failed(
        wrong(headline="request 0 has nan in its output", check="finite"), case="decode-b", like="eager:decode-a"
    )
    further = failed(wrong(headline="request 1 has nan in its output"), case="decode-c", like="eager:decode-b")
    assert causes(first, alike, further, failed(wrong("b"), case="decode-d")) == [(3, "a"), (1, "b")]
    assert causes(failed(wrong("b"), case="decode-z"), alike) == [(1, "b"), (1, "request 0 has nan in its output")]


def test_eager_and_graph_of_a_case_are_one_cause_where_both_have_wrong_numbers():
    eager, graph = failed(wrong("a"), case="decode-a"), failed(wrong("b"), case="decode-a")
    graph = replace(graph, execution="graph")
    assert causes(eager, graph) == [(2, "a")]
    stale = replace(graph, findings=(wrong("b", check="replay-follows-batch"),))
    assert causes(eager, stale) == [(1, "a"), (1, "b")], "eager is right there"
    assert causes(eager, replace(graph, case="decode-b")) == [(1, "a"), (1, "b")]
    assert causes(eager, replace(graph, execution="eager")) == [(1, "a"), (1, "b")], "it is no copy"
    stored = failed(wrong(headline="a slot was written", check="writes-own-kv"), case="decode-a")
    assert len(causes(eager, replace(stored, execution="graph"))) == 2


def test_causes_say_of_each_failure_whether_it_is_the_first_of_its_cause():
    found = Causes()
    assert [found.add(failed(wrong(hint))) for hint in ("a", "a\nb", "c", "c")] == [True, False, True, False]
    assert [len(group.results) for group in found.groups] == [2, 2]


def test_a_hint_that_only_says_why_the_check_is_blamed_is_no_cause_unless_it_is_all_there_is():
    why = (
        "the graph still uses a value from capture time (a length, stride, grid size or pointer): captured with this "
        "batch, it is right"
    )
    check = {"check": "replay-follows-batch"}
    assert causes(failed(wrong(f"{why}\nonly replays with padded rows are wrong", **check))) == [
        (1, "only replays with padded rows are wrong")
    ]
    assert causes(failed(wrong(why, **check)), failed(wrong(why, 2, **check))) == [(2, why)]
    exact = "data of padded rows reach real ones: the step passes in a bucket of exactly {}"
    assert causes(failed(wrong(exact.format(1))), failed(wrong(exact.format(3)))) == [(2, exact.format(1))]


@pytest.mark.parametrize(
    "why",
    [
        "the graph still uses a value from capture time (a length, stride, grid size or pointer): captured with this "
        "batch, it is right",
        "only the graph is wrong, even if it is captured with this batch: look at what is the same in every capture",
        "with zeros instead of NaN in unowned slots the result is finite",
        "with zeros instead of NaN in unowned slots and keys that no row selects the result is finite, and right",
        "the step is right as the only replay of the only bucket",
        "the step is right when no other mode and no eager step uses the instance, and no co-resident instance runs",
        "data of padded rows reach real ones, by a sum: the step passes in a bucket of exactly 3",
        "the same eager step passes on a fresh instance without graphs",
        "state of an earlier step is kept: the step is right as the first of a fresh instance",
    ],
)
def test_each_reason_to_blame_a_check_is_known(why):
    assert causes(failed(wrong(f"{why}\ntelling"))) == [(1, "telling")]


def test_a_headline_that_is_a_cause_is_taken_and_its_hints_are_not():
    headline = "KV memory is wrong after the step: a slot that no live request owns was written"
    results = [failed(wrong(hint, headline=headline, check="writes-own-kv")) for hint in ("", "it holds row 3", "x")]
    assert causes(*results) == [(3, headline)]
    shape = "layer {n} returned shape ({n}, 2, 32), expected (10, 2, 32) or (10, 64)"
    results = [failed(wrong(headline=shape, n=n, check="output-contract")) for n in (0, 1)]
    assert causes(*results) == [(2, shape.format(n=0))]


def test_without_a_hint_the_headline_of_a_wrong_number_says_what_it_can():
    assert causes(failed(wrong(n=3)), failed(wrong(n=56))) == [(2, NUMBER.format(n=3))]


RAISED = "{phase} raised AttributeError: 'DenseBackend' object has no attribute 'visible'"


def test_what_one_line_raises_is_one_cause_in_whatever_phase():
    def raised(phase: str, where: str, what: str = RAISED) -> CaseResult:
        return failed(wrong(headline=what.replace("{phase}", phase), check="completes", where=where))

    place = "dense.py:88 in forward"
    assert causes(raised("capture", f"{place}: x = self.visible"), raised("forward", place)) == [
        (2, RAISED.replace("{phase}", "capture"))
    ]
    assert len(causes(raised("capture", place), raised("capture", "dense.py:89 in forward"))) == 2
    assert len(causes(raised("capture", place), raised("capture", place, "{phase} raised ValueError: no"))) == 2
    assert len(causes(raised("capture", "out[layer 0] = 1"), raised("capture", "out[layer 1] = 2"))) == 1


def test_stray_accesses_of_one_kernel_and_the_wrong_numbers_of_the_same_case_are_one_cause():
    def stray(where: str, case: str = "decode-a", kind: str = "StrayAccessError") -> CaseResult:
        headline = f"forward raised {kind}: a store of triton kernel f"
        return failed(wrong(headline=headline, check="completes", where=where), case=case)

    first, second = stray("k.py:169 in f: tl.store(a)"), stray("k.py:174 in f: tl.store(b)")
    assert causes(first, second) == [(2, first.findings[0].headline)]
    assert len(causes(first, stray("k.py:174 in g: tl.store(b)"))) == 2, "another kernel"
    assert len(causes(stray("k.py:1 in f: a", kind="KeyError"), stray("k.py:2 in f: b", kind="KeyError"))) == 2
    numbers = failed(wrong("the KV tokens of the last page are missing"))
    assert [count for count, _ in causes(numbers, replace(first, execution="graph"), second)] == [3]
    assert [count for count, _ in causes(numbers, replace(stray("k.py:1 in f: a", "decode-b"), execution="graph"))] == [
        1,
        1,
    ]


def test_what_died_is_grouped_by_what_it_said_first_and_where_it_stood():
    said = "no result after 300 s"
    frame = '\n  File "/home/me/{}.py", line {}, in forward'
    assert causes(crashed("exit code 7\n  a"), crashed("exit code 7\n  b"), crashed("killed by SIGSEGV")) == [
        (2, "exit code 7"),
        (1, "killed by SIGSEGV"),
    ]
    assert causes(
        crashed("CUDA error: an illegal memory access\n x"), crashed("CUDA error: an illegal memory access")
    ) == [(2, "CUDA error: an illegal memory access")]
    hung = [crashed(said + frame.format("kernels", line) + frame.format("outer", 3)) for line in (12, 12, 40)]
    assert causes(*hung) == [(2, f"{said}, in kernels.py:12 forward"), (1, f"{said}, in kernels.py:40 forward")]
    assert causes(crashed("")) == [(1, "crashed")]


@pytest.mark.parametrize(
    ("text", "alike"),
    [
        ("accepted counts are 1, 3, 5 of 6: rows are packed", "accepted counts are N of N: rows are packed"),
        ("only heads 0-3, 5 of 8 attended", "only head N of N attended"),
        ("only head 2 of 8 attended", "only head N of N attended"),
        ("KV tokens 0..12 of request 3", "KV tokens N of request N"),
        (
            "request 2 was computed with KV tokens 0..3 of request 1, request 3 row 1 was computed with KV tokens 0..4 "
            "of request 2 and so on: offsets",
            "request N was computed with KV tokens N of request N: offsets",
        ),
        (
            "offsets are wrong: request 4 was computed with KV tokens 0..9 of request 1, request 5 was computed with "
            "KV tokens 0..9 of request 4",
            "offsets are wrong: request N was computed with KV tokens N of request N",
        ),
        ("request 0 row 2 holds that of request 0 row 0: order", "request N holds that of request N: order"),
        ("wrong weights: look at scale, soft cap", "wrong weights"),
        ("an error of only 3.2 times the limit: precision", "an error of only N times the limit: precision"),
        ("splits are merged (rows of up to 16 are right, of 20 wrong)", "splits are merged"),
        ("a soft cap (it comes before the mask)", "a soft cap (it comes before the mask)"),
        ("wrong after eager:decode-mha2-d64-bf16-b1prod: kept", "wrong after another case-run: kept"),
        ("wrong after the 4 case-runs that repro names: kept", "wrong after another case-run: kept"),
        ("tensor at 0x7f3a of -1.5e-08", "tensor at N of N"),
        ("int64, bf16 and sm90 stay, as does v2", "int64, bf16 and sm90 stay, as does v2"),
        ("", ""),
    ],
)  # fmt: skip
def test_what_belongs_to_one_case_is_left_out(text, alike):
    assert without_numbers(text) == alike
    assert without_numbers(alike) == alike, "a text that is alike stays so"


@pytest.mark.parametrize(
    ("library", "named"),
    [
        ("/usr/lib/python3.12/ctypes/__init__.py", False),
        ("/home/me/lib/python3.11/site-packages/torch/ops.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        ("/home/me/lib/python3.11/site-packages/my_pkg/ops.py", True),
        ("/home/me/torch/ops.py", True),
    ],
)
def test_a_crash_is_put_down_to_the_line_that_called_a_library_and_not_to_the_librarys(library: str, named: bool):
    """What dies inside of ctypes or torch was called with something."""
    stack = f'killed by SIGSEGV\n  File "{library}", line 519 in inner\n  File "/home/me/kernel.py", line 13 in run'
    ((_, cause),) = causes(crashed(stack))
    inner = f"{library.rpartition('/')[2]}:519 inner"
    assert cause == f"killed by SIGSEGV, in {inner if named else 'kernel.py:13 run'}"
    ((_, alone),) = causes(crashed(stack.rpartition("\n")[0]))
    assert alone == f"killed by SIGSEGV, in {inner}", "better than none"


def test_a_stray_access_is_named_by_its_hint_and_another_exception_by_its_headline():
    def raised(headline: str) -> CaseResult:
        return failed(
            wrong("8 bytes past the end of x\nmask it", headline=headline, check="completes", where="k.py:1 in f")
        )

    access, other = "forward raised RaceError: a store of triton kernel f", "forward raised ValueError: bad scale"
    assert causes(raised(access)) == [(1, f"{access}; 8 bytes past the end of x")]
    assert causes(raised(other)) == [(1, other)]


def test_one_line_of_code_under_two_names_of_torchs_operators_is_one_cause():
    def waits(operator: str, line: int, check: str) -> CaseResult:
        return failed(
            wrong(headline=f"Tensor.__int__ ({operator})", check=check, where=f"attn.py:{line} in forward: int(x)")
        )

    item, scalar = "aten.item.default", "aten._local_scalar_dense.default"
    found = causes(
        waits(item, 8, "no-host-lengths"), waits(scalar, 8, "captures-cleanly"), waits(item, 9, "no-host-lengths")
    )
    assert found == [(2, f"Tensor.__int__ ({item})"), (1, f"Tensor.__int__ ({item})")]


RESULTS = st.lists(
    st.builds(
        lambda backend, check, lines, n: failed(wrong("\n".join(lines), n, check=check), backend=backend),
        st.sampled_from("ab"),
        st.sampled_from(["finite", "matches-oracle"]),
        st.lists(st.sampled_from(["a 1", "a 2", "b", "c", ""]), max_size=3),
        st.integers(0, 3),
    ),
    max_size=30,
)


@given(RESULTS)
def test_every_failure_is_in_exactly_one_group_and_says_its_cause(results):
    results = [replace(result, case=f"decode-{number}") for number, result in enumerate(results)]
    found = group_failures(results)
    assert sorted(r.case for group in found for r in group.results) == sorted(r.case for r in results)
    assert all(isinstance(group, Group) and group.results for group in found)
    assert [len(group.results) for group in found] == sorted((len(group.results) for group in found), reverse=True)
    for group in found:
        assert {result.backend for result in group.results} == {group.backend}
        said = [
            {without_numbers(line) for line in (f.headline, *f.hint.splitlines())}
            for r in group.results
            for f in r.findings
        ]
        assert any(without_numbers(group.cause) in each for each in said)
    names = [(group.backend, without_numbers(group.cause)) for group in found]
    assert len(set(names)) == len(names)
