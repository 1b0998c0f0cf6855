"""FlashInfer's log-sum-exps: base 2, its merge_state, and plans of parts in pages of one key."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from in_process import check_backend

pytest.importorskip("flashinfer")

from attn_testkit.runner_modes.harness import context_for

from attn_testkit.backends.flashinfer import FlashInferBackend
from attn_testkit.backends.flashinfer_kv_splits import merged, part_plan
from attn_testkit.backends.flashinfer_mla import FlashInferMLABackend
from attn_testkit.backends.flashinfer_plan import PagePlan, bytes_of_partials, workspace
from attn_testkit.backends.vendor.flashinfer_kernels import MERGE_STATE
from attn_testkit.backends.vendor.provider import fake_of
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import ForwardBatch, ForwardMode, KVSplit
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import make_schedule

DECODE = "decode-gqa4x2-d64-bf16-p16-k9.40.0-shuffled-gauss-{}-b4prod"


def states(*numbers: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, 1, 2] that are each a number, and log-sum-exps [T, 1] of 0."""
    out = torch.tensor(numbers, dtype=torch.bfloat16).view(-1, 1, 1).expand(-1, 1, 2).contiguous()
    return out, torch.zeros(len(numbers), 1)


def test_the_fake_of_merge_state_is_in_base_2_and_takes_empty_states() -> None:
    merge = fake_of(MERGE_STATE)
    (out_a, lse_a), (out_b, lse_b) = states(1.0, 1.0, 1.0), states(3.0, 3.0, 3.0)
    lse_b[:, 0] = torch.tensor([torch.log2(torch.tensor(3.0)), -torch.inf, -torch.inf])
    lse_a[2] = -torch.inf
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    assert out[:, 0, 0].tolist() == pytest.approx([2.5, 1.0, 0.0])
    assert lse[:, 0].tolist() == pytest.approx([2.0, 0.0, -torch.inf])


def test_a_call_that_the_package_would_refuse_is_refused() -> None:
    out, lse = states(1.0)
    with pytest.raises(TypeError):
        fake_of(MERGE_STATE)(out, lse, out)
    with pytest.raises(TypeError):
        fake_of(MERGE_STATE)(out, lse, out, lse, base=2)


def random_states(heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, heads, *each) for each in ((dim,), (), (dim,), ()))


@pytest.mark.parametrize(
    ("dtype", "dim", "most"), [(torch.bfloat16, 512, 32), (torch.bfloat16, 64, 128), (torch.float16, 128, 64)]
)
def test_more_heads_than_a_block_has_threads_for_are_refused_and_are_merged_in_parts(
    dtype: torch.dtype, dim: int, most: int
) -> None:
    merge = fake_of(MERGE_STATE)
    for heads in (most, most + 1, 3 * most + 1):
        out_a, lse_a, out_b, lse_b = random_states(heads, dim)
        given = out_a.to(dtype), lse_a, out_b.to(dtype), lse_b
        if heads > most:
            with pytest.raises(RuntimeError, match="MergeState kernel launch failed"):
                merge(*given)
        out, lse = merged(merge, *given)
        one_by_one = [merge(*(each[:, head : head + 1].contiguous() for each in given)) for head in range(heads)]
        torch.testing.assert_close(out, torch.cat([each for each, _ in one_by_one], 1))
        torch.testing.assert_close(lse, torch.cat([each for _, each in one_by_one], 1))


def test_partial_outputs_are_counted_as_the_planner_counts_them() -> None:
    """FlashInfer 0.7.2.post1 on an H200: "Buffer overflow when allocating memory for batch_prefill_tmp_v with size
    301465600", of 512 requests with 2 rows each."""
    (layer, *_) = make_layers(parse_case("decode-gqa8x16-d64-bf16-p16-k9-shuffled-gauss-b1prod"))
    context = mock.Mock(layers=(layer,), max_num_tokens=1024, max_bs=512)
    assert bytes_of_partials(context) == 301_465_600 // 64 * 65
    cpu = torch.device("cpu")
    small, large = workspace(cpu, True), workspace(cpu, True, 301_465_600)
    assert large.numel() == (301_465_600 + (1 << 20)) >> 7
    assert small.numel() <= large.numel()
    assert workspace(cpu, True) is large


class DeclaresNatural(FlashInferBackend):
    """As if its log-sum-exp were natural."""

    lse = FlashInferBackend.capabilities.lse
    assert lse is not None
    capabilities = FlashInferBackend.capabilities.with_changes(lse=replace(lse, base="e", merges=False))


def test_its_log_sum_exp_is_in_base_2() -> None:
    eager = {"executions": ["eager"], "device": "cpu"}
    results = check_backend(DeclaresNatural, cases=[DECODE.format("lsewhole")], **eager)
    assert "it is in base 2, but base e is declared" in str(results)
    for backend, words in ((FlashInferBackend, "lsepages2merged"), (FlashInferBackend, "w5-lsetokens3merged")):
        assert check_backend(backend, cases=[DECODE.format(words)], **eager)
    rows = "extend-mha2-d64-fp16-p16-k9.20-n3a2x2-shuffled-gauss-kvhnd-lsepages2merged-b2prod-noncausal"
    assert check_backend(FlashInferBackend, cases=[rows], **eager)
    mla = "decode-mla16-d512r64-bf16-p16-k9.40.0-shuffled-gauss-lsepages2merged-b4prod"
    assert check_backend(FlashInferMLABackend, cases=[mla], **eager)


CAUSAL = PagePlan(
    qo_indptr=torch.tensor([0, 2, 4], dtype=torch.int32),
    kv_lens=torch.tensor([5, 2], dtype=torch.int32),
    kv_indptr=torch.tensor([0, 2, 3], dtype=torch.int32),
    last_page_len=torch.tensor([1, 2], dtype=torch.int32),
    kv_indices=torch.tensor([1, 2, 3], dtype=torch.int32),
    custom_mask=None,
    page_size=4,
)
"""A request of five keys, of which two are new, and a request of two keys, both new."""


def planned(part: KVSplit, plan: PagePlan = CAUSAL, *, window: int = -1, masked: bool = True) -> PagePlan:
    case = parse_case("extend-gqa2x2-d64-bf16-p4-k3.0-n2a2x2-shuffled-gauss-b2prod")
    context = context_for([make_schedule(case)], torch.device("cpu"), make_layers(case))
    context.req_to_token[1, :5] = torch.tensor([8, 9, 10, 11, 4], dtype=torch.int32)
    context.req_to_token[2, :2] = torch.tensor([12, 13], dtype=torch.int32)
    rows = torch.tensor([1, 2])
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=2, input_ids=torch.arange(4), req_pool_indices=rows,
        seq_lens=plan.kv_lens.long(), out_cache_loc=torch.arange(4), positions=torch.arange(4),
    )  # fmt: skip
    return part_plan(context, batch, plan, part, window=window, masked=masked)


@pytest.mark.parametrize(
    ("part", "slots", "indptr", "mask"),
    [
        (KVSplit("prefix"), [8, 9, 10], [0, 3, 3], "111 111"),
        (KVSplit("new"), [11, 4, 12, 13], [0, 2, 4], "10 11 10 11"),
        (KVSplit("rank", 0, 2, 1), [8, 10, 4, 12], [0, 3, 4], "110 111 1 1"),
        (KVSplit("rank", 1, 2, 1), [9, 11, 13], [0, 2, 3], "11 11 0 1"),
        (KVSplit("rank", 1, 2, 4), [4], [0, 1, 1], "0 1"),
    ],
    ids=str,
)
def test_a_part_lists_its_keys_one_a_page_and_says_who_sees_them(
    part: KVSplit, slots: list[int], indptr: list[int], mask: str
) -> None:
    plan = planned(part)
    assert plan.kv_indices[:-1].tolist() == slots, "and one behind them, so that there is always one"
    assert plan.kv_indptr.tolist() == indptr
    assert plan.kv_lens.tolist() == [b - a for a, b in pairwise(indptr)]
    assert plan.last_page_len.tolist() == [1, 1]
    assert plan.custom_mask is not None
    assert plan.custom_mask.int().tolist() == [int(bit) for bit in mask if bit != " "]
    assert plan.qo_indptr is CAUSAL.qo_indptr
    assert plan.page_size == 1


def test_windows_go_by_positions_and_without_a_mask_by_what_is_listed() -> None:
    windowed = planned(KVSplit("prefix"), window=1)
    assert windowed.custom_mask is not None
    assert windowed.custom_mask.int().tolist() == [0, 0, 1, 0, 0, 0], "rows at 3 and 4 see back to 2 and 3"
    assert planned(KVSplit("prefix"), window=2, masked=False).kv_indices[:-1].tolist() == [10]
    assert planned(KVSplit("prefix"), masked=False).custom_mask is None


def test_a_tree_mask_is_cut_to_the_keys_of_the_part() -> None:
    first = [1, 1, 1, 1, 0, 1, 1, 1, 0, 1]
    tree = replace(CAUSAL, custom_mask=torch.tensor([*first, 1, 0, 0, 1]).bool())
    plan = planned(KVSplit("new"), tree)
    assert plan.custom_mask is not None
    assert plan.custom_mask.int().tolist() == [1, 0, 0, 1, 1, 0, 0, 1]
