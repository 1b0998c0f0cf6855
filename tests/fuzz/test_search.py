"""The search on backends that are a condition: what fails is found, made small, and the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.features.rows import rows_of
from attn_testkit.cases.plans import context_len
from attn_testkit.catalogue.minimal import minimal_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, Execution, ForwardMode
from attn_testkit.examples import MinimalBackend
from attn_testkit.fuzz.search import Found, Search, TimeUp
from attn_testkit.fuzz.strategies import random_cases
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding

CAPABILITIES = TorchNativeBackend.capabilities
Fails = Callable[[Case, str], str]
MODES = st.sampled_from(sorted(ForwardMode))


def search_for(
    fails: Fails, *, most: int = 150, seed: int = 0, declared: Capabilities = CAPABILITIES, **more
) -> Search:
    """A search on a backend that fails the check that ``fails`` names, if any.

    To find the failures of this file and make them small takes less than half of the case-runs, whatever Hypothesis is
    there; in the others a search that goes on could spoil what it found.
    """

    def run(case: Case, execution: str) -> CaseResult:
        check = fails(case, execution)
        findings = (Finding(check, "wrong"),) if check else ()
        status = Status.FAILED if check else Status.PASSED
        return CaseResult("m:B", case.mode.value, execution, case.id, status, findings)

    values = {"modes": [ForwardMode.DECODE], "executions": list(Execution), "seconds": 600.0, "explain": run, **more}
    search = Search(declared=declared, run=run, seed=seed, most=most, **values)
    search.begin()
    return search


def found_by(fails: Fails, **more) -> dict[tuple[str, str], Found]:
    search = search_for(fails, **more)
    search.go_on()
    return search.found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), MODES)
def test_every_case_is_one_that_an_id_rebuilds_and_that_the_capabilities_hold(data, mode) -> None:
    case = data.draw(random_cases(CAPABILITIES, mode))
    assert parse_case(case.id) == case
    assert case.mode is mode
    assert case.heads.family in CAPABILITIES.heads.families
    assert case.head_dim in CAPABILITIES.heads.head_dims
    assert case.page_size in CAPABILITIES.kv_pool.page_sizes
    assert max(rows_of(case)) <= (
        CAPABILITIES.bounds.max_extend_tokens if mode is ForwardMode.EXTEND else CAPABILITIES.bounds.max_q_rows
    )
    assert case.topk <= CAPABILITIES.bounds.max_topk
    assert context_len(case) <= CAPABILITIES.bounds.max_context_len


NARROW = MinimalBackend.capabilities.with_changes(
    kv_pool={"page_sizes": {16}},
    heads={"head_dims": {64}, "families": {"mqa"}, "gqa_ratios": {4}},
    precision={"dtypes": {"bf16"}},
    bounds={"max_q_rows": 2, "max_topk": 1, "max_context_len": 300, "max_extend_tokens": 5},
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), MODES)
def test_narrow_capabilities_are_kept(data, mode) -> None:
    case = data.draw(random_cases(NARROW, mode))
    assert (str(case.heads), case.head_dim, case.dtype, case.page_size) == ("mqa4", 64, "bf16", 16)
    assert (case.window, case.logit_cap, case.sinks, case.kv_dtype) == (-1, 0.0, False, "same")
    assert max(rows_of(case)) <= 5 if mode is ForwardMode.EXTEND else case.rows_at_once <= 2
    assert case.topk <= 1
    assert context_len(case) <= 300


@pytest.mark.parametrize("declared", [CAPABILITIES, NARROW])
@pytest.mark.parametrize("mode", ForwardMode)
def test_what_everything_is_shrunk_towards_is_the_plainest_case(declared: Capabilities, mode: ForwardMode) -> None:
    # As the search: it explains nothing by Hypothesis.
    quiet = settings(database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck),
                     phases=[Phase.generate, Phase.shrink])  # fmt: skip
    assert find(random_cases(declared, mode), lambda case: True, settings=quiet) == minimal_case(declared, mode)


def test_what_no_capability_leaves_a_head_layout_for_is_said() -> None:
    with pytest.raises(ValueError, match="decode is declared, but no head layout that goes with it is"):
        random_cases(CAPABILITIES.with_changes(heads={"families": {"gqa"}, "gqa_ratios": {1}}), ForwardMode.DECODE)


def test_a_failure_is_made_small_and_says_what_is_not_plain() -> None:
    (found,) = found_by(
        lambda case, _: "matches-oracle" if case.page_size > 8 and max(case.prefixes) > 20 else "", most=250
    ).values()
    small = parse_case(found.smallest.case)
    assert found.kind == ("decode", "matches-oracle")
    assert set(found.odd) == {"page_size", "prefixes"}
    assert (small.page_size, small.prefixes) == (16, (21,))
    assert (small.dtype, small.layout, small.data, small.seed) == ("bf16", "contiguous", "gauss", 0)


def test_two_failures_of_different_checks_are_both_found_and_not_mixed_up() -> None:
    def fails(case: Case, execution: str) -> str:
        if case.sinks:
            return "finite"
        return "matches-oracle" if case.dtype == "fp16" else ""

    found = found_by(fails)
    assert {kind[1]: each.odd for kind, each in found.items()} == {"finite": ("sinks",), "matches-oracle": ("dtype",)}


def test_a_failure_under_graphs_alone_ends_under_graphs() -> None:
    (found,) = found_by(lambda case, execution: "replay-follows-batch" if execution == "graph" else "").values()
    assert found.smallest.execution == "graph"
    assert found.odd == ()


def test_the_first_failure_and_the_smallest_are_explained_and_nothing_between_them() -> None:
    asked: list[str] = []

    def explain(case: Case, execution: str) -> CaseResult:
        asked.append(case.id)
        finding = Finding("finite", "wrong", hint="why")
        return CaseResult("m:B", case.mode.value, execution, case.id, Status.FAILED, (finding,))

    found = found_by(lambda case, _: "finite" if case.sinks else "", explain=explain)["decode", "finite"]
    assert asked == [found.first.case, found.smallest.case]
    assert len(set(asked)) == 2
    assert [each.findings[0].hint for each in (found.first, found.smallest)] == ["why", "why"]


@pytest.mark.parametrize("check", ["", "matches-oracle"])
def test_a_failure_that_is_another_when_it_is_explained_stays_as_it_was(check: str) -> None:
    def explain(case: Case, execution: str) -> CaseResult:
        findings = (Finding(check, "wrong", hint="why"),) if check else ()
        status = Status.FAILED if check else Status.PASSED
        return CaseResult("m:B", case.mode.value, execution, case.id, status, findings)

    (found,) = found_by(lambda case, _: "finite" if case.sinks else "", explain=explain).values()
    assert [each.findings for each in (found.first, found.smallest)] == [(Finding("finite", "wrong"),)] * 2


def test_a_healthy_backend_gives_nothing() -> None:
    search = search_for(lambda case, _: "")
    search.go_on()
    assert search.found == {}
    assert search.runs == 150


def cases_of(seed: int) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    found_by(lambda case, execution: seen.append((case.id, execution)) or "", most=40, seed=seed)
    return seen


def test_the_same_seed_gives_the_same_cases_and_another_seed_others() -> None:
    first = cases_of(7)
    assert len(first) == len(set(first)) == 40
    assert cases_of(7) == first
    assert cases_of(8) != first


@pytest.mark.parametrize(("seconds", "runs"), [(3.0, 3), (3.5, 4)])
def test_no_case_run_begins_when_the_time_is_up(seconds: float, runs: int) -> None:
    now = [10.0]

    def fails(case: Case, execution: str) -> str:
        now[0] += 1.0
        return ""

    search = search_for(fails, seconds=seconds, clock=lambda: now[0])
    search.go_on()
    assert search.runs == runs


def test_what_was_found_is_kept_when_the_time_is_up_while_it_is_made_small() -> None:
    search = search_for(lambda case, _: "finite" if case.window >= 0 else "", most=12)
    told: list[str] = []
    search.on_smaller = lambda found: told.append(found.smallest.case)
    search.go_on()
    (found,) = search.found.values()
    assert told[-1] == found.smallest.case
    assert len(found.odd) <= len(search._odd(found.first))


def test_old_failures_are_tried_again_and_the_search_does_not_find_them_twice() -> None:
    old = "decode-mha2-d32-bf16-p16-k0-contiguous-gauss-b1prod"
    search = search_for(lambda case, _: "matches-oracle" if case.page_size > 8 else "", most=60)
    (result,) = search.again([("eager", old)])
    assert result.status is Status.FAILED
    search.go_on()
    assert list(search.found) == [("decode", "matches-oracle")]
    assert search.found["decode", "matches-oracle"].smallest.case == old


def test_old_failures_end_with_the_time_too() -> None:
    search = search_for(lambda case, _: "", most=0)
    with pytest.raises(TimeUp):
        list(search.again([("eager", "decode-mha2-d32-bf16-p16-k0-contiguous-gauss-b1prod")]))


@pytest.mark.parametrize("mode", ForwardMode)
def test_what_not_every_server_does_is_drawn_where_it_is_declared(mode: ForwardMode) -> None:
    missing = {word for case in generate(CAPABILITIES, mode, "core") for word in case.variants} - {
        "far",
        "shapes",
        "bigpool",
        "piecewise",
    }
    missing |= {"two", "with parts"}
    few = settings(database=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=5_000,
                   phases=[Phase.generate])  # fmt: skip

    def last_of_them(case: Case) -> bool:
        assert parse_case(case.id) == case
        assert not case.kv_splits or "given_out" not in case.variants
        both = {"two"} if len(case.variants) > 1 else set()
        missing.difference_update(case.variants, both, {"with parts"} if case.kv_splits and case.variants else set())
        return not missing

    assert last_of_them(find(random_cases(CAPABILITIES, mode), last_of_them, settings=few))


@given(st.data(), MODES)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
def test_what_is_not_declared_of_servers_is_not_drawn(data, mode) -> None:
    case = data.draw(random_cases(MinimalBackend.capabilities, mode))
    assert case.variants <= {"empty_batches", "overlap_scheduling"}
    assert "empty_batches" not in case.variants or (case.chunks == 1 and case.layout != "shared")
    other = data.draw(random_cases(CAPABILITIES, mode))
    assert "noncausal" not in other.variants or other.topk <= 1
    assert (other.non_causal_window != "none") == ("noncausal" in other.variants and other.window >= 0)
    assert "no_tree_tensors" not in other.variants or other.topk <= 1
