"""Cases of arrays take batches, rows, parts, ways and padding that none before them had together; the rest stays."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from as_made import as_made, without_arrays

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.cases.plans import context_len
from attn_testkit.catalogue.kv_splits import split_cases
from attn_testkit.catalogue.layer_cases import layer_cases
from attn_testkit.catalogue.named import named_from, smallest_of, without_options_of
from attn_testkit.catalogue.randomly_combined import randomly_combined, randomly_varied
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.examples import MinimalBackend

CAPABILITIES = TorchNativeBackend.capabilities
KEPT = ("mode", "heads", "head_dim", "rope_dim", "dtype", "kv_dtype", "page_size", "kv_layout", "window", "logit_cap")
KEPT += ("sinks", "seed")


def arrays(declared: Capabilities, mode: ForwardMode) -> list[Case]:
    """Those cases of arrays, as they are made."""
    there = set(without_arrays(declared, mode, "core"))
    return [case for case in as_made(declared, mode, "core") if case not in there]


def kind(case: Case) -> str:
    own = (*sorted(case.variants), case.kv_splits.rstrip("0123456789"), "groups" * case.layers.groups)
    return " ".join(filter(None, own))


@pytest.mark.parametrize("mode", ForwardMode)
def test_they_are_as_many_and_keep_what_the_array_gave_them(mode: ForwardMode) -> None:
    minimal = arrays(CAPABILITIES, mode)
    rich = list(randomly_combined(CAPABILITIES, minimal))
    assert len(rich) == len(set(rich)) == len(minimal) >= 12
    for before, after in zip(minimal, rich, strict=True):
        assert [getattr(before, name) for name in KEPT] == [getattr(after, name) for name in KEPT]


@pytest.mark.parametrize(
    "declared", [CAPABILITIES, MinimalBackend.capabilities.with_changes(kv_layouts={"nhd", "hnd"})]
)
@pytest.mark.parametrize("mode", ForwardMode)
def test_each_is_one_that_its_id_rebuilds_and_that_is_declared(declared: Capabilities, mode: ForwardMode) -> None:
    for case in randomly_combined(declared, arrays(declared, mode)):
        assert parse_case(case.id) == case
        assert not_declared(declared, case) == ""


@pytest.mark.parametrize("mode", ForwardMode)
def test_more_meets_than_in_the_cases_as_they_are_made(mode: ForwardMode) -> None:
    minimal = arrays(CAPABILITIES, mode)
    rich = list(randomly_combined(CAPABILITIES, minimal))
    own = {(kind(case), case.layout, case.chunks) for case in rich}
    assert len({kind(case) for case in rich}) >= 5
    assert len({case.layout for case in rich}) == 5
    assert len({case.bs for case in rich}) >= 3
    assert len(own) > 2 * len({(kind(case), case.layout, case.chunks) for case in minimal})
    assert pairs(rich) > 3 * pairs(minimal)


def pairs(cases: list[Case]) -> int:
    of_each = (
        [kind(case), case.layout, case.data, case.bucket - case.bs, case.new, case.prefixes, case.page_size]
        for case in cases
    )
    return len({(i, j, a, b) for row in of_each for (i, a), (j, b) in combinations(enumerate(row), 2)})


def test_what_is_not_declared_is_not_taken() -> None:
    narrow = CAPABILITIES.with_changes(
        lse=None,
        kv_groups=False,
        server={"takes_out": False, "takes_more_rows": False, "takes_bare_chains": False},
        non_causal=(),
    )
    for mode in ForwardMode:
        found = list(randomly_combined(narrow, arrays(narrow, mode)))
        assert found
        assert {word for case in found for word in kind(case).split()} <= {
            "empty_batches",
            "zero_length_padding",
            "seq_lens_with_new",
            "overlap_scheduling",
        }


def test_trees_that_branch_have_no_window_where_that_is_not_declared() -> None:
    chains = CAPABILITIES.with_changes(windows={"in_trees": False})
    found = list(randomly_combined(chains, arrays(chains, ForwardMode.TARGET_VERIFY)))
    assert {case.topk > 1 for case in found if case.window < 0} == {False, True}
    assert {case.topk > 1 for case in found if case.window >= 0} == {False}


@pytest.mark.parametrize("room", [0, 1])
def test_none_is_longer_than_the_context_that_is_declared(room: int) -> None:
    case, *_ = randomly_combined(CAPABILITIES, arrays(CAPABILITIES, ForwardMode.DECODE)[:1])
    most = context_len(case) - 1 + room
    again, *_ = randomly_combined(
        CAPABILITIES.with_changes(max_context_len=most), arrays(CAPABILITIES, ForwardMode.DECODE)[:1]
    )
    assert (again == case) is (room == 1)
    assert context_len(again) <= most


def test_a_case_that_takes_nothing_stays_as_it_is() -> None:
    (case,) = arrays(CAPABILITIES, ForwardMode.DECODE)[:1]
    short = CAPABILITIES.with_changes(max_context_len=1)
    assert set(randomly_combined(short, [replace(case, prefixes=(530,))])) == {replace(case, prefixes=(530,))}


@pytest.mark.parametrize(("count", "most"), [(3, 12), (11, 12), (12, 12), (13, 13)])
def test_cases_of_a_short_array_come_again_with_something_else(count: int, most: int) -> None:
    found = list(randomly_combined(CAPABILITIES, arrays(CAPABILITIES, ForwardMode.DECODE)[:count]))
    assert len(found) == len(set(found)) == most


TWO_THINGS = {"layers": layer_cases, "kv_splits": split_cases}
MODES = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY)


def small(mode: ForwardMode) -> Case:
    cases = list(without_arrays(CAPABILITIES, mode, "core"))
    return smallest_of(CAPABILITIES, without_options_of(CAPABILITIES, named_from(mode, cases)))


def optional(case: Case) -> bool:
    return case.window >= 0 or case.sinks or case.logit_cap > 0


@pytest.mark.parametrize("kind", TWO_THINGS)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_made_for_two_things_has_other_slots_data_and_padding_each(mode: ForwardMode, kind: str) -> None:
    minimal = list(TWO_THINGS[kind](CAPABILITIES, small(mode)))
    changed = list(randomly_varied(CAPABILITIES, minimal))
    assert len(changed) == len(minimal)
    kept = (*KEPT, "prefixes", "new", "variants", "kv_splits", "merged_by_backend", "layers", "tree", "chunks")
    for before, after in zip(minimal, changed, strict=True):
        assert [getattr(before, name) for name in kept] == [getattr(after, name) for name in kept]
        assert parse_case(after.id) == after
        assert optional(before) or after == before, "the plain one stays as simple as it is"
        assert before.data in ("gauss", after.data), "data that were chosen for what they show"
    both = [(case.layout, case.bucket - case.bs, case.padding) for case in changed if optional(case)]
    assert len(set(both)) >= len(both) * 3 / 4 >= 3


def test_ways_have_other_batches_and_rows_as_well() -> None:
    minimal = [
        case
        for case in as_made(CAPABILITIES, ForwardMode.EXTEND, "core")
        if case.window == 7 and case.variants & {"given_out", "padded_tokens", "overlap_scheduling"}
    ]
    assert len({case.prefixes for case in minimal}) <= 2
    for batches, most in ((True, len(minimal)), (False, 0)):
        changed = list(randomly_varied(CAPABILITIES, minimal, batches=batches))
        assert sum(before.prefixes != after.prefixes for before, after in zip(minimal, changed, strict=True)) <= most
        assert bool(most) is any(b.new != a.new for b, a in zip(minimal, changed, strict=True))
        assert all(before.variants <= after.variants for before, after in zip(minimal, changed, strict=True))
