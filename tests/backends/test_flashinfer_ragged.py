"""FlashInfer's prefill in two parts, on the fakes of its kernels: conformant, and mistakes in a part are caught."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flashinfer", reason="the flashinfer extra is not installed")

from in_process import assert_passes_on_fakes, texts_of_failure

from attn_testkit.backends.flashinfer_plan import PagePlan, exclusive_sum, prefix_plan
from attn_testkit.backends.flashinfer_ragged import FlashInferRaggedBackend
from attn_testkit.backends.vendor.warmup import families_of
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.steps.data import DTYPES, make_layers

CHUNKS = "extend-gqa8x2-d64-bf16-p16-k32.128.64.16-n6a1x3.19-chunks3-reversed-gauss-cap1.5-b7stale"
NO_PREFIX_FIRST = "extend-mha2-d64-bf16-p1-k0.1.8-n5a11.1x2-chunks3-contiguous-peaked-b3prod"
WINDOW = "extend-mha2-d64-bf16-p32-k300.70.12-n13a1x2.35-chunks3-shuffled-negative-kvfp8e4m3-w4-b4nan"
ITSELF = "extend-gqa2x2-d64-bf16-p32-k1.2.5.9.14.2.30-n1a1x7-chunks3-reversed-gauss-w0-b7prod"
SHARED = "extend-mqa4-d64-bf16-p32-k64.65.32-n12a33.2.1-chunks3-shared-gauss-b4prod"
FP8 = "extend-gqa8x2-d64-bf16-p16-k33.24.3-n4a4.3.4-shuffled-gauss-kvfp8e4m3-kvinblock-b4prod"
HEADS_FIRST = "extend-gqa8x2-d64-bf16-p16-k33.24.3-n4a4.3.4-shuffled-gauss-kvfp8e4m3-kvhnd-b4prod"
SEES_ALL = "extend-mqa4-d64-bf16-p16-k9.70.0-n10a20.1.7-reversed-gauss-b3prod-noncausal"
LSE = "extend-gqa2x2-d64-bf16-p1-k5.0.1x2.70-n2a2.1.2.1.2-reversed-peaked-w0-lsewhole-b6prod"
GROUPS = "extend-mqa4-d64-bf16-p16-k39.70.6-n2a2x3-reversed-gauss-kvfp8e4m3-w7-cap1.5-layers3from5groups-b4prod"
HEALTHY = (CHUNKS, NO_PREFIX_FIRST, WINDOW, ITSELF, SHARED, FP8, HEADS_FIRST, SEES_ALL, LSE, GROUPS)


def test_every_kind_of_case_passes_and_says_that_its_kernels_are_emulated() -> None:
    assert_passes_on_fakes("flashinfer_ragged", "eager", HEALTHY)


FAULTS = [
    ("PrefixOfTheFirstAlone", NO_PREFIX_FIRST, "differs from the oracle"),
    ("NaturalLogSumExp", CHUNKS, "differs from the oracle"),
    ("PrefixIsCausal", SHARED, "differs from the oracle"),
    ("WindowOfThePrefix", WINDOW, "differs from the oracle"),
    ("NewRowsAsStored", FP8, "new rows are attended to as the pool stores them"),
    ("RaggedWhateverIsSaved", CHUNKS, "with save_kv_cache=False, k and v may be None"),
]


@pytest.mark.parametrize(("fault", "case", "message"), FAULTS)
def test_a_mistake_in_a_part_is_caught(fault: str, case: str, message: str) -> None:
    texts = texts_of_failure(
        f"faulty_flashinfer_ragged:{fault}", message, device="cpu", executions=["eager"], cases=[case]
    )
    assert any(message in text for text in texts), texts


def whole_plan(prefix: list[int], rows: list[int], page_size: int) -> PagePlan:
    """Pages 10, 11, ... of all keys."""
    kv_lens, q_lens = torch.tensor(prefix) + torch.tensor(rows), torch.tensor(rows)
    pages = -(-kv_lens // page_size)
    return PagePlan(
        qo_indptr=exclusive_sum(q_lens),
        kv_lens=kv_lens.to(torch.int32),
        kv_indptr=exclusive_sum(pages),
        last_page_len=(kv_lens - (pages - 1) * page_size).to(torch.int32),
        kv_indices=10 + torch.arange(int(pages.sum()), dtype=torch.int32),
        custom_mask=None,
        page_size=page_size,
    )


def test_a_prefix_is_planned_without_the_pages_of_new_rows_alone() -> None:
    plan = prefix_plan(whole_plan([8, 0, 5], [1, 9, 3], 4), window=-1)
    assert plan.kv_indptr.tolist() == [0, 2, 2, 4]
    assert plan.kv_indices.tolist() == [10, 11, 16, 17], "8 keys end with a page, and 5 leave one key on the second"
    assert plan.kv_lens.tolist() == [8, 0, 5]
    assert plan.last_page_len.tolist() == [4, 4, 1]
    assert plan.qo_indptr.tolist() == [0, 1, 10, 13]
    assert plan.custom_mask is None
    assert {t.dtype for t in (plan.kv_indptr, plan.kv_indices, plan.last_page_len)} == {torch.int32}


@pytest.mark.parametrize(
    ("window", "pages", "seen"),
    [
        (0, [], []),
        (1, [11], [[0, 0, 0, 1], [0, 0, 0, 0]]),
        (4, [11], [[1, 1, 1, 1], [0, 1, 1, 1]]),
        (5, [10, 11], [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]]),
        (8, [10, 11], [[1] * 8, [0] + [1] * 7]),
        (9, [10, 11], [[1] * 8, [1] * 8]),
    ],
)
def test_a_window_leaves_the_pages_that_it_reaches_and_masks_the_rest(
    window: int, pages: list[int], seen: list[list[int]]
) -> None:
    plan = prefix_plan(whole_plan([8], [2], 4), window)
    assert plan.kv_indices.tolist() == pages
    assert plan.kv_lens.tolist() == [4 * len(pages)]
    assert plan.custom_mask is not None
    assert plan.custom_mask.view(2, -1).int().tolist() == (seen or [[], []])


def test_masks_of_requests_follow_each_other() -> None:
    plan = prefix_plan(whole_plan([3, 0, 2], [1, 2, 2], 1), window=2)
    assert plan.kv_indices.tolist() == [11, 12, 16, 17]
    assert plan.custom_mask is not None
    assert plan.custom_mask.int().tolist() == [1, 1, 1, 1, 0, 1]


def test_the_warmup_compiles_what_both_parts_of_a_core_case_need() -> None:
    compiled = {family.arguments for family in families_of(["flashinfer_ragged"])}
    needed = set()
    for case in generate(FlashInferRaggedBackend.capabilities, ForwardMode.EXTEND, "core"):
        dtype = DTYPES[case.dtype]
        stored = dtype if case.kv_dtype == "same" else DTYPES[case.kv_dtype]
        for layer in make_layers(case):
            shape, windowed = (torch.int32, layer.head_dim, layer.head_dim, 0), layer.sliding_window_size >= 0
            for kv, window in ((dtype, windowed), (stored, windowed), (stored, False)):
                needed.add(("fa2", dtype, kv, dtype, *shape, window, layer.logit_cap > 0, False))
    assert needed <= compiled
    assert len({family[8:10] for family in needed}) == 4, "window and soft cap: each alone, both, neither"
