"""In which order cases come when there may be no time for all of them."""

from __future__ import annotations

import itertools

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.running.planning.most_valuable import most_valuable_first, pairs_of, richest_first, values_of, work_of
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.request import Item, Plan, Request

CAPABILITIES = TorchNativeBackend.capabilities
ONE, TWO = "attn_testkit.backends.torch_native:TorchNativeBackend", "torch_native"


def planned(*backends: str, **fields: object) -> Plan:
    return plan_run(Request(backends, device="cpu", tier="core", **fields), lambda _: CAPABILITIES)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def usual() -> Plan:
    return planned(ONE)


@pytest.fixture(scope="module")
def valuable() -> Plan:
    return planned(ONE, order="most valuable")


def test_it_is_the_same_case_runs_in_another_order(usual: Plan, valuable: Plan) -> None:
    assert sorted(map(str, usual.items)) == sorted(map(str, valuable.items))
    assert usual.items != valuable.items
    assert usual.header.planned == valuable.header.planned


def test_every_value_comes_before_pairs_do(valuable: Plan) -> None:
    """What smoke does: the first cases meet each value that any case of the plan has."""
    cases = list(dict.fromkeys(item.case for item in valuable.items))
    everything = {value for case in cases for value in values_of(parse_case(case))}
    met: set[object] = set()
    count = 0
    while met != everything:
        met |= values_of(parse_case(cases[count]))
        count += 1
    assert count < len(cases) / 2
    head = [parse_case(case).inference_mode for case in cases[:count]]
    assert head == sorted(head), "one round"


def test_what_failed_last_time_comes_before_the_rest_in_the_first_round(valuable: Plan) -> None:
    last = [item for item in valuable.items if not parse_case(item.case).inference_mode][-1]
    items = planned(ONE, order="most valuable", failed_before=((ONE, last.case), ("other", "x"))).items
    assert [item.execution for item in items[:2]] == ["eager", "graph"]
    assert {item.case for item in items[:2]} == {last.case}


def test_eager_and_graph_of_a_case_stay_together(valuable: Plan) -> None:
    cases = [item.case for item in valuable.items]
    assert len(list(itertools.groupby(cases))) == len(set(cases))


def test_a_backend_is_not_left_to_the_end_because_it_was_named_last() -> None:
    items = planned(ONE, TWO, order="most valuable").items
    runs = [spec for spec, _ in itertools.groupby(item.backend for item in items)]
    assert runs[:4] == [ONE, TWO, ONE, TWO]
    assert len(runs) < 16


def test_a_process_goes_back_to_no_grad_once_a_round_at_most(valuable: Plan) -> None:
    """Each time takes a new worker, which imports the backend: for a server as long as a hundred case-runs."""
    modes = [parse_case(item.case).inference_mode for item in valuable.items]
    back = sum(before and not after for before, after in itertools.pairwise(modes))
    assert 1 < back <= 3


def test_in_a_round_cases_with_little_work_come_before_those_with_a_hundred_times_as_much(valuable: Plan) -> None:
    """A case of 80 s that comes first leaves no time for those of one (`--budget`)."""
    cases = [parse_case(item.case) for item in valuable.items]
    first_round = next(i for i, case in enumerate(cases) if case.inference_mode)
    work = [work_of(case) for case in cases[:first_round]]
    assert work == sorted(work)
    assert set(work) > {0}
    few, more = "decode-gqa8x2-d128-bf16-p16-k{}-shuffled-gauss-layers1from0-b2prod", 128 * 16
    exact = 10**7 // (16 * 128)
    assert [work_of(parse_case(few.format(keys - 1))) for keys in (exact, exact + 1, 100 * exact)] == [0, 1, 1]
    assert more * exact < 10**7 <= more * (exact + 1)


def cases_of(*words: str) -> list[Case]:
    return [parse_case(f"decode-gqa2x2-{word}-b2prod") for word in words]


def test_each_time_the_case_with_the_most_pairs_that_are_new() -> None:
    base, like, other, between = cases_of(
        "d32-fp32-p4-k3-shuffled-gauss",
        "d32-fp32-p4-k3-shuffled-peaked",
        "d64-bf16-p8-k9-reversed-mean",
        "d64-bf16-p4-k3-shuffled-gauss",
    )
    assert list(richest_first([base, like, between, other], pairs_of)) == [base, other, like, between]
    assert list(richest_first([like, other], pairs_of, met=[base])) == [other, like]


def test_the_lazy_search_finds_what_a_full_search_finds() -> None:
    cases = list(generate(CAPABILITIES, ForwardMode.DECODE, "core", 0))[:60]
    seen: set[object] = set()
    waiting, expected = list(cases), []
    while waiting:
        best = max(waiting, key=lambda case: (len(pairs_of(case) - seen), -cases.index(case)))
        waiting.remove(best)
        seen |= pairs_of(best)
        expected.append(best)
    assert list(richest_first(cases, pairs_of)) == expected


def test_pairs_are_of_what_is_tried_and_not_of_the_seed() -> None:
    (case,) = cases_of("d32-fp32-p4-k3-shuffled-gauss")
    assert pairs_of(case) == pairs_of(case.with_seed(3))


def test_no_case_is_lost_where_groups_overlap() -> None:
    cases = cases_of("d32-fp32-p4-k3-shuffled-gauss", "d64-bf16-p8-k9-reversed-mean")
    entries = [(Item("m", "decode", "eager", case.id), case) for case in cases]
    for failed in ([], [cases[1].id], [case.id for case in cases]):
        found = most_valuable_first(entries, [("m", case) for case in failed])
        assert sorted(item.case for item in found) == sorted(case.id for case in cases)
