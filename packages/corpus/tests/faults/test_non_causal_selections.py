"""Selections in layers that are not causal: later keys count as any others, for the kernel and for the indexer."""

from __future__ import annotations

import re

import numpy as np
import pytest
from in_process import check_backend

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.selection import Selection
from attn_testkit.families.sparse.data import _chosen_blocks, make_sparse_data
from attn_testkit.results.case_result import Status
from attn_testkit.results.failure_text import format_failure
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.catalogue import entry_of
from attn_testkit_corpus.faults.s_non_causal import NonCausalIndexer

GIVEN = "extend-mla4-d128r64-bf16-p16-k9.30.0-n20a20.3.17-shuffled-gauss-sel16-b3prod-noncausal"
SELECTED = "target-verify-mqa4-d64-bf16-p16-k9.60.30-chain4-shuffled-gauss-sel16-idx4-b4prod-noncausal"


def test_rows_select_keys_after_their_own() -> None:
    schedule = make_schedule(parse_case(GIVEN))
    data = make_sparse_data(schedule, schedule.steps[0])
    assert data.selected is not None
    later = data.selected > data.row_key[:, None]
    assert bool(later.any(-1).any())
    assert bool((data.selected >= 0).any(-1).all())


@pytest.mark.parametrize("position", [3, 21, 63])
def test_a_row_lists_the_block_of_its_own_key_wherever_it_is(position: int) -> None:
    selection = Selection(2, block=16)
    for seed in range(4):
        found = _chosen_blocks(np.arange(64), position, selection, "newest", np.random.default_rng(seed))
        assert position // 16 in found
        assert len(set(found.tolist())) == 2


@pytest.mark.parametrize("backend", [NonCausalIndexer, TorchNativeSparseBackend])
def test_who_masks_no_selected_key_is_right(backend: type) -> None:
    found = check_backend(backend, device="cpu", cases=[GIVEN, SELECTED], executions=["eager"])
    assert [result.status for result in found if result.case] == [Status.PASSED] * 2


@pytest.mark.parametrize(
    ("slug", "case"), [("selected-later-keys-masked", GIVEN), ("indexer-of-non-causal-layer-is-causal", SELECTED)]
)
def test_a_causal_mask_is_found_and_named(slug: str, case: str) -> None:
    fault = entry_of(slug)
    found = check_backend(fault.backend, device="cpu", cases=[case], executions=["eager"])
    (result,) = (each for each in found if each.case)
    assert result.status is Status.FAILED
    assert result.findings[0].check in fault.checks
    assert re.search(fault.hint, format_failure(result)), format_failure(result)
