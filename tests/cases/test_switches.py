"""Batch sizes at which a kernel changes: a batch on either side, in every tier."""

from __future__ import annotations

import re

import pytest

from attn_testkit.catalogue.seldom_cases import BATCHES
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Bounds, Capabilities, ForwardMode
from attn_testkit.examples import MinimalBackend
from attn_testkit.steps.schedule import make_schedule

CAPABILITIES = MinimalBackend.capabilities


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("tier", ["smoke", "core"])
def test_each_side_of_a_switch_has_a_batch_behind_all_but_the_seldom_cases(mode: ForwardMode, tier: str) -> None:
    minimal = generate(CAPABILITIES, mode, tier)
    cases = generate(CAPABILITIES.with_changes(bounds={"kernel_changes_at": {5, 6, 20}}), mode, tier)
    behind = 0 if tier == "smoke" else len(BATCHES)
    kept = len(minimal) - behind
    added = cases[kept : len(cases) - behind]
    assert cases == (*minimal[:kept], *added, *minimal[kept:])
    assert [(case.bs, case.bucket) for case in minimal[kept:]] == [*BATCHES][:behind]
    assert [(case.bs, case.bucket) for case in added] == [(n, n) for n in (4, 5, 6, 19, 20)]
    assert [make_schedule(case).max_bs for case in added] == [4, 5, 6, 19, 20]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({1}, "kernel_changes_at must be whole numbers from 2 on, got ['1']"),
        ({2.5}, "kernel_changes_at must be whole numbers from 2 on, got ['2.5']"),
        (8, "kernel_changes_at must be a set or list of values, got 8; write {8}"),
    ],
)
def test_what_is_no_batch_size_is_answered(sizes: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Capabilities(eager={ForwardMode.DECODE}, bounds=Bounds(kernel_changes_at=sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [mode for mode in ForwardMode if mode is not ForwardMode.DRAFT_DECODE])
@pytest.mark.parametrize(("sums", "most"), [({16, 17}, 1 << 20), ({1000}, 1 << 20), ({1000}, 96)])
def test_each_side_of_a_sum_of_keys_has_a_batch(mode: ForwardMode, sums: set[int], most: int) -> None:
    declared = CAPABILITIES.with_changes(bounds={"max_context_len": most})
    before = generate(declared, mode, "smoke")
    added = set(generate(declared.with_changes(bounds={"kernel_changes_at_keys": sums}), mode, "smoke")) - {*before}
    wanted = sorted({total for at in sums for total in (at - 1, at)})
    steps = [make_schedule(case).steps[0] for case in added]
    assert sorted(sum(step.lens) for step in steps) == wanted
    assert all(max(step.lens) <= most and len(step.lens) > 1 for step in steps)
