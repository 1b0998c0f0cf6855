"""The search on backends that are a condition: what fails is made small, whatever ends it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.minimize.search import Search, TimeUp
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding

CAPABILITIES = TorchNativeBackend.capabilities
Fails = Callable[[Case], str]
RICH = "decode-gqa4x2-d128-fp16-p16-k300.70.12-shuffled-peaked-kvfp8e4m3-w11-cap1.5-sink-b5nan"
V1 = "draft-extend-gqa2x2-d64-fp16-p16-k7x3-n6a1.3.5-reversed-gauss-b4stale"


def search_for(fails: Fails, *, declared: Capabilities = CAPABILITIES, **more: object) -> Search:
    """A search on a backend that fails the check that ``fails`` names, if any."""

    def run(case: Case) -> CaseResult:
        assert not_declared(declared, case) == ""
        check = fails(case)
        findings = (Finding(check, "wrong"),) if check else ()
        status = Status.FAILED if check else Status.PASSED
        return CaseResult("m:B", case.mode.value, "eager", case.id, status, findings)

    return Search(declared, run, **{"seconds": 600.0, **more})  # type: ignore[arg-type]


def made_small(fails: Fails, name: str, **more: object) -> Search:
    search = search_for(fails, **more)
    search.begin(parse_case(name))
    search.go_on()
    return search


def wrong_where(condition: Callable[[Case], bool]) -> Fails:
    return lambda case: "matches-oracle" if condition(case) else ""


@pytest.mark.parametrize(
    ("condition", "name", "small"),
    [
        (lambda case: case.page_size > 8, RICH, "decode-mha2-d32-bf16-p16-k0-contiguous-gauss-b1prod"),
        (
            lambda case: case.sinks and max(case.prefixes) > 20, RICH,
            "decode-mha2-d32-bf16-p1-k21-contiguous-gauss-sink-b1prod",
        ),
        (lambda case: case.bucket - case.bs > 1, RICH, "decode-mha2-d32-bf16-p1-k0-contiguous-gauss-b3prod"),
        (lambda case: case.bs > 1, RICH, "decode-mha2-d32-bf16-p1-k0x2-contiguous-gauss-b2prod"),
        (
            lambda case: case.window >= 3 and case.heads.family == "gqa", RICH,
            "decode-gqa2x2-d32-bf16-p1-k0-contiguous-gauss-w3-b1prod",
        ),
        (
            lambda case: len(set(case.new)) > 1, V1,
            "draft-extend-mha2-d32-bf16-p1-k0x2-n2a1.2-contiguous-gauss-b2prod",
        ),
        (
            lambda case: 3 in case.new, V1,
            "draft-extend-mha2-d32-bf16-p1-k0-n3a3-contiguous-gauss-b1prod",
        ),
        # Only one request fails, and it is not the first.
        (
            lambda case: any(k == 70 for k in case.prefixes), RICH,
            "decode-mha2-d32-bf16-p1-k70-contiguous-gauss-b1prod",
        ),
        (
            lambda case: case.topk > 1 and case.tree.depth > 2,
            "target-verify-mha2-d64-bf16-p4-k3.9-t0.0.1.1.3-shared-rising_logits-b2prod",
            "target-verify-mha2-d32-bf16-p1-k0-t0.0.1.3-contiguous-gauss-b1prod",
        ),
        (
            lambda case: max(case.new) > 9 and case.chunks > 1,
            "extend-gqa4x2-d64-bf16-p16-k7.0x2-n27a17.33.1-chunks3-shared-gauss-b3prod",
            "extend-mha2-d32-bf16-p1-k0-n10a10-chunks2-contiguous-gauss-b1prod",
        ),
        (
            lambda case: case.draft.branches > 1,
            "draft-decode-gqa2x2-d64-bf16-p16-k33.0-topk3steps6-shuffled-gauss-b3nan",
            "draft-decode-mha2-d32-bf16-p1-k0-topk2steps2-contiguous-gauss-b1prod",
        ),
    ],
)  # fmt: skip
def test_what_is_left_is_what_the_failure_needs(condition: Callable[[Case], bool], name: str, small: str) -> None:
    search = made_small(wrong_where(condition), name)
    assert search.case.id == small
    assert search.plain_passes


def test_a_long_request_is_cut_to_the_first_length_that_fails() -> None:
    name = "decode-mha2-d64-bf16-p16-k66000-contiguous-one_hot-b1prod"
    search = made_small(wrong_where(lambda case: max(case.prefixes) > 32_767), name)
    assert search.case.prefixes == (32_768,)
    assert search.odd() == ["keys"]
    assert search.runs < 150


def test_of_many_requests_as_many_are_left_as_it_takes() -> None:
    (name,) = (
        case.id
        for case in generate(CAPABILITIES, ForwardMode.DECODE, "core")
        if case.bs == 132 and case.layout != "shuffled"
    )
    search = made_small(wrong_where(lambda case: case.bs > 32), name)
    assert search.case.id == "decode-mha2-d32-bf16-p1-k0x33-contiguous-gauss-b33prod"
    assert search.runs < 150


def test_only_declared_cases_are_run() -> None:
    declared = CAPABILITIES.with_changes(
        kv_pool={"page_sizes": {4, 16}}, windows={"smallest": 2, "in_trees": False}, heads={"head_dims": {64, 128}}
    )
    search = made_small(wrong_where(lambda case: case.window >= 0), RICH, declared=declared)
    assert search.case.id == "decode-mha2-d64-bf16-p4-k0-contiguous-gauss-w2-b1prod"


def test_a_case_that_passes_is_run_once_and_is_no_failure() -> None:
    search = search_for(lambda case: "")
    assert search.begin(parse_case(RICH)).status is Status.PASSED
    assert search.smallest is None
    assert search.runs == 1


def other_check_at_small_pages(case: Case) -> str:
    return "finite" if case.page_size < 4 else "matches-oracle" if case.sinks else ""


def test_the_same_check_fails_to_the_end_unless_any_may() -> None:
    declared = CAPABILITIES.with_changes(kv_pool={"page_sizes": {1, 2, 16}})
    same = made_small(other_check_at_small_pages, RICH, declared=declared)
    assert (same.case.page_size, same.case.sinks) == (16, True)
    assert not same.plain_passes
    any_check = made_small(other_check_at_small_pages, RICH, declared=declared, any_failure=True)
    assert any_check.odd() == []


def test_where_the_plainest_case_fails_another_plain_one_takes_its_place() -> None:
    def fails(case: Case) -> str:
        return "matches-oracle" if 0 in case.prefixes or case.sinks else ""

    search = made_small(fails, RICH)
    assert search.minimal is not None
    assert search.minimal.prefixes == (5,)
    assert search.case.id == "decode-mha2-d32-bf16-p1-k5-contiguous-gauss-sink-b1prod"


def test_where_every_plain_case_fails_nothing_is_needed() -> None:
    search = made_small(lambda case: "matches-oracle", RICH)
    assert search.case.id == "decode-mha2-d32-bf16-p1-k0-contiguous-gauss-b1prod"
    assert search.odd() == []
    assert not search.plain_passes


def test_features_that_act_through_the_hash_of_the_id_alone_give_way_to_a_seed() -> None:
    def fails(case: Case) -> str:
        unlucky = case.seed == 2 or (case.dtype, case.head_dim, case.page_size) == ("fp16", 128, 16)
        return "matches-oracle" if case.layout == "shuffled" and unlucky else ""

    search = made_small(fails, RICH)
    assert search.case.id == "decode-mha2-d32-bf16-p1-k0-shuffled-gauss-b1prod-s2"


def test_it_does_the_same_each_time_and_asks_nothing_twice() -> None:
    def ids() -> list[str]:
        seen: list[str] = []
        made_small(lambda case: seen.append(case.id) or "finite" if case.sinks else "", RICH)
        return seen

    first = ids()
    assert len(first) == len(set(first))
    assert ids() == first


@pytest.mark.parametrize(("seconds", "runs"), [(3.0, 3), (3.5, 4)])
def test_no_case_run_begins_when_the_time_is_up_and_the_smallest_so_far_is_left(seconds: float, runs: int) -> None:
    now = [10.0]

    def fails(case: Case) -> str:
        now[0] += 1.0
        return "finite" if case.sinks else ""

    search = search_for(fails, seconds=seconds, clock=lambda: now[0])
    search.begin(parse_case(RICH))
    with pytest.raises(TimeUp):
        search.go_on()
    assert search.runs == runs
    assert search.case.sinks
    assert len(search.odd()) < 12


def test_what_does_not_hold_is_forgotten() -> None:
    search = made_small(wrong_where(lambda case: case.sinks), RICH)
    search.forget()
    assert search.case.id == RICH
