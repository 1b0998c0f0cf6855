"""The fake of FlashAttention 3: it refuses what the compiled code refuses, and keeps the splits of a capture."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_testkit_servers.bridges.vllm.flash_attn_fake import fwd, get_scheduler_metadata
from attn_testkit_servers.bridges.vllm.flash_attn_plan import split_plan

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, PAGE, REQUESTS = 4, 2, 64, 16, 2


def _schedule(
    lens: torch.Tensor, starts: torch.Tensor, most_rows: int, most_keys: int, splits: int, **changed: Any
) -> torch.Tensor:
    given: dict[str, Any] = {
        "batch_size": REQUESTS, "max_seqlen_q": most_rows, "max_seqlen_k": most_keys, "num_heads": HEADS,
        "num_heads_k": KV_HEADS, "headdim": DIM, "headdim_v": DIM, "qkv_dtype": BF16, "seqused_k": lens,
        "cu_seqlens_q": starts, "cu_seqlens_k": None, "cu_seqlens_k_new": None, "seqused_q": None, "leftpad_k": None,
        "page_size": PAGE, "max_seqlen_k_new": 0, "is_causal": True, "window_size_left": -1, "window_size_right": -1,
        "has_softcap": False, "num_splits": splits, "pack_gqa": None, "sm_margin": 0,
    }  # fmt: skip
    return get_scheduler_metadata(**given | changed)


def _arguments(lens: list[int], most_keys: int, dtype: torch.dtype = BF16) -> dict[str, Any]:
    """One row for the first request, two for the second, and a page table with room for ``most_keys`` keys."""
    generator = torch.Generator().manual_seed(1)
    pages = -(-most_keys // PAGE)
    q = torch.randn(3, HEADS, DIM, generator=generator).to(dtype)
    k, v = (torch.randn(REQUESTS * pages, PAGE, KV_HEADS, DIM, generator=generator).to(dtype) for _ in "kv")
    return {
        "q": q, "k": k, "v": v, "k_new": None, "v_new": None, "q_v": None,
        "out": torch.full((3, HEADS, DIM), torch.nan, dtype=BF16 if dtype == FP8 else dtype),
        "cu_seqlens_q": torch.tensor([0, 1, 3], dtype=torch.int32), "cu_seqlens_k": None, "cu_seqlens_k_new": None,
        "seqused_q": None, "seqused_k": torch.tensor(lens, dtype=torch.int32), "max_seqlen_q": 2,
        "max_seqlen_k": most_keys,
        "page_table": torch.arange(REQUESTS * pages, dtype=torch.int32).view(REQUESTS, pages),
        "kv_batch_idx": None, "leftpad_k": None, "rotary_cos": None, "rotary_sin": None, "seqlens_rotary": None,
        "q_descale": None, "k_descale": None, "v_descale": None, "softmax_scale": 0.125, "is_causal": True,
        "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True,
        "scheduler_metadata": None, "num_splits": 0, "pack_gqa": None, "sm_margin": 0, "s_aux": None,
        "cp_world_size": 1, "cp_rank": 0, "cp_tot_seqused_k": None,
    }  # fmt: skip


def _by_hand(given: dict[str, Any], sinks: torch.Tensor | None = None) -> torch.Tensor:
    found = torch.zeros(3, HEADS, DIM, dtype=torch.float64)
    for row, (request, ahead) in enumerate([(0, 0), (1, 1), (1, 0)]):
        seen = int(given["seqused_k"][request]) - ahead
        pages = given["page_table"][request].long()
        for head in range(HEADS):
            keys, values = (given[x][pages].flatten(0, 1)[:seen, head // 2].double() for x in "kv")
            logits = keys @ given["q"][row, head].double() * 0.125
            extra = logits.new_empty(0) if sinks is None else sinks[head : head + 1].double()
            found[row, head] = torch.softmax(torch.cat([logits, extra]), 0)[:seen] @ values
    return found


def test_it_attends_to_the_keys_of_each_request_with_and_without_a_schedule_and_sinks() -> None:
    given, sinks = _arguments([9, 33], 48), torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=BF16)
    given["scheduler_metadata"] = _schedule(given["seqused_k"], given["cu_seqlens_q"], 2, 48, 0)
    for s_aux in (None, sinks):
        given["out"].fill_(torch.nan)
        fwd(**given | {"s_aux": s_aux})
        assert (given["out"].double() - _by_hand(given, s_aux)).abs().max() < 0.02


def test_scales_of_fp8_multiply_queries_keys_and_values_of_their_request_and_head() -> None:
    given = _arguments([9, 33], 48, FP8)
    fwd(**given)
    plain = given["out"].clone()
    halves = torch.full((REQUESTS, KV_HEADS), 0.5)
    twice = torch.tensor([[2.0, 2.0], [2.0, 4.0]])
    fwd(**given | {"q_descale": halves, "k_descale": halves * 4, "v_descale": twice})
    assert torch.equal(given["out"][0], plain[0] * 2)
    assert torch.equal(given["out"][1:, 2:], plain[1:, 2:] * 4)


LONG = 4096


def _replayed(captured_with: int, replayed_with: int, splits: int) -> torch.Tensor:
    """[3] bool: rows that a graph writes whose launch was decided for so many keys, at a replay with a schedule for
    other lengths, in vLLM's buffer: it copies a schedule to the front and clears what follows.
    """
    given = _arguments([replayed_with, replayed_with], LONG)
    size = _schedule(given["seqused_k"], given["cu_seqlens_q"], 2, captured_with, splits).shape[0]
    buffer = torch.zeros(1 + 4 * 4, dtype=torch.int32)
    made = _schedule(given["seqused_k"], given["cu_seqlens_q"], 2, replayed_with, splits)
    buffer[: made.shape[0]] = made
    # The captured call has all keys that fit: its grid reaches those of any replay.
    fwd(**given | {"max_seqlen_k": captured_with, "scheduler_metadata": buffer[:size], "num_splits": splits})
    return ~given["out"].isnan().flatten(1).any(1)


def test_a_replay_for_which_the_heuristic_chooses_other_splits_writes_no_row() -> None:
    assert split_plan(REQUESTS, 2, 64, HEADS, KV_HEADS, DIM, 2, True, -1, -1, 0).splits == 1
    assert split_plan(REQUESTS, 2, LONG, HEADS, KV_HEADS, DIM, 2, True, -1, -1, 0).splits > 1
    assert _replayed(LONG, LONG, 0).all()
    assert not _replayed(LONG, 64, 0).any(), "the schedule of a replay lacks the vector of splits"
    assert not _replayed(64, LONG, 0).any(), "and here the captured launch has no second kernel"


def test_a_number_of_splits_that_the_server_gives_holds_for_every_replay() -> None:
    assert _replayed(LONG, 64, 32).all()
    assert _replayed(LONG, LONG, 32).all()


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "float32 queries": (lambda a: {"q": a["q"].float()}, "only supports fp16, bf16, and fp8_e4m3"),
    "keys of another dtype": (lambda a: {"k": a["k"].half()}, "query and key must have the same dtype"),
    "values of another dtype": (lambda a: {"v": a["v"].half()}, "query and value must have the same dtype"),
    "queries with a stride": (
        lambda a: {"q": a["q"].transpose(1, 2).contiguous().transpose(1, 2)},
        "Input tensor must have contiguous last dimension",
    ),
    "a page table of int64": (lambda a: {"page_table": a["page_table"].long()}, "page_table must have dtype"),
    "a page table with a stride": (
        lambda a: {"page_table": a["page_table"].t().contiguous().t()},
        "page_table must have contiguous last dimension",
    ),
    "offsets with a stride": (
        lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].repeat_interleave(2)[::2]},
        "cu_seqlens_q must be contiguous",
    ),
    "offsets of int64": (lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].long()}, "cu_seqlens_q must have dtype"),
    "offsets of more requests": (
        lambda a: {"cu_seqlens_q": torch.tensor([0, 1, 3, 3], dtype=torch.int32)},
        "batch_size must be equal to batch_size_k",
    ),
    "heads that do not divide": (
        lambda a: {"q": a["q"][:, :3], "out": a["out"][:, :3]},
        "Number of heads in key/value must divide",
    ),
    "keys of another width": (lambda a: {"k": a["k"][..., :32]}, "k must have shape"),
    "narrower values": (lambda a: {"v": a["v"][..., :32]}, "If V headdim is different"),
    "fewer pages of values": (lambda a: {"v": a["v"][:1]}, "v must have shape"),
    "lengths of int64": (lambda a: {"seqused_k": a["seqused_k"].long()}, "seqused_k must have dtype int32"),
    "lengths with a stride": (
        lambda a: {"seqused_k": a["seqused_k"].repeat_interleave(2)[::2]},
        "seqused_k must be contiguous",
    ),
    "lengths of fewer requests": (lambda a: {"seqused_k": a["seqused_k"][:1]}, "seqused_k must have shape"),
    "a head dim of 60": (
        lambda a: {x: a[x][..., :60] for x in ("q", "k", "v", "out")},
        "head_size should be a multiple of 8",
    ),
    "a head dim of 264": (
        lambda a: {x: torch.cat([a[x]] * 5, -1)[..., :264] for x in ("q", "k", "v", "out")},
        "only supports head dimension at most 256",
    ),
    "outputs of another dtype": (lambda a: {"out": a["out"].half()}, "output must have the same dtype as inputs"),
    "outputs with a stride": (
        lambda a: {"out": a["out"].transpose(1, 2).contiguous().transpose(1, 2)},
        "Output tensor must have contiguous last dimension",
    ),
    "outputs of fewer rows": (lambda a: {"out": a["out"][:2]}, "out must have shape"),
    "a longer schedule": (
        lambda a: {"scheduler_metadata": torch.zeros(99, dtype=torch.int32)},
        "scheduler_metadata must have shape",
    ),
    "a schedule with a stride": (
        lambda a: {"scheduler_metadata": torch.zeros(18, dtype=torch.int32)[::2]},
        "scheduler_metadata must be contiguous",
    ),
    "a schedule of int64": (
        lambda a: {"scheduler_metadata": torch.zeros(9, dtype=torch.int64)},
        "scheduler_metadata must have dtype",
    ),
    "257 splits": (lambda a: {"num_splits": 257}, "num_splits > 256 not supported"),
    "a scale per request": (lambda a: {"k_descale": torch.ones(REQUESTS)}, "a descale must have shape"),
    "sinks in float32": (lambda a: {"s_aux": torch.zeros(HEADS)}, "We only support bf16 dtype for S aux"),
    "sinks in fp16": (lambda a: {"s_aux": torch.zeros(HEADS).half()}, "We only support bf16 dtype for S aux"),
    "sinks of fewer heads": (lambda a: {"s_aux": torch.zeros(2, dtype=BF16)}, "s_aux must have shape"),
    "sinks with a stride": (lambda a: {"s_aux": torch.zeros(8, dtype=BF16)[::2]}, "s_aux must be contiguous"),
    "sinks of 68 heads": (
        lambda a: {"s_aux": torch.zeros(68, dtype=BF16), **{x: a[x].repeat(1, 17, 1) for x in ("q", "out")}},
        "We only support query heads <= 64 with S aux",
    ),
}  # fmt: skip
"""What is changed in arguments that are accepted, and a part of the compiled code's text (``hopper/flash_api.cpp``)."""


@pytest.mark.parametrize("name", REFUSALS)
def test_it_refuses_what_the_compiled_code_refuses(name: str) -> None:
    given, (change, text) = _arguments([9, 33], 48), REFUSALS[name]
    fwd(**given)
    with pytest.raises(RuntimeError, match=re.escape(text)):
        fwd(**given | change(given))


def test_fp8_needs_head_dims_in_steps_of_16_and_outputs_in_bf16() -> None:
    given = _arguments([9, 33], 48, FP8)
    narrow = {x: given[x][..., :56] for x in ("q", "k", "v", "out")}
    with pytest.raises(RuntimeError, match="head_size should be a multiple of 16"):
        fwd(**given | narrow)
    with pytest.raises(RuntimeError, match="For FP8 input, output must have dtype BF16"):
        fwd(**given | {"out": given["out"].half()})


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"qkv_dtype": torch.float32}, "only supports fp16, bf16"), ({"num_heads": 3}, "must divide number of heads")],
)
def test_no_schedule_is_made_for_arguments_that_the_compiled_code_refuses(changed: dict[str, Any], text: str) -> None:
    given = _arguments([9, 33], 48)
    with pytest.raises(RuntimeError, match=text):
        _schedule(given["seqused_k"], given["cu_seqlens_q"], 2, 48, 0, **changed)


@pytest.mark.parametrize(
    ("dim", "itemsize", "rows", "window", "tile"),
    [
        (64, 2, 1, -1, (64, 192)), (64, 2, 64, -1, (192, 128)), (64, 2, 64, 100, (192, 160)),
        (96, 2, 1, -1, (192, 128)), (128, 2, 1, -1, (64, 128)), (128, 2, 64, -1, (128, 128)),
        (256, 2, 2, -1, (128, 80)),
        (256, 2, 2, 100, (128, 64)),
        (64, 1, 1, -1, (64, 128)), (128, 1, 1, -1, (64, 96)), (128, 1, 64, -1, (128, 192)), (256, 1, 2, 100, (128, 64)),
    ],
)  # fmt: skip
def test_tiles_are_those_of_sm90(dim: int, itemsize: int, rows: int, window: int, tile: tuple[int, int]) -> None:
    plan = split_plan(3, rows, 4096, 8, 4, dim, itemsize, True, window, -1, 0)
    assert (plan.rows_per_tile, plan.keys_per_tile) == tile


def test_the_heuristic_splits_few_long_requests_and_no_short_ones_or_large_batches() -> None:
    """Two tiles of rows on 132 multiprocessors: 22 splits, one for each tile of 4096 keys, occupy a third of them, and
    19 are the fewest with 85% of that. 66 would occupy all, and 57 are the fewest with 85%.
    """
    by_keys = [split_plan(3, 1, keys, 8, 2, 64, 2, True, -1, -1, 0).splits for keys in (768, 769, 4096, 66_000)]
    assert by_keys == [1, 5, 19, 57]
    assert split_plan(3, 4096, 66_000, 8, 2, 64, 2, True, -1, -1, 0).splits == 1, "rows occupy the GPU"
    assert split_plan(3, 1, 66_000, 8, 2, 64, 2, True, 100, -1, 0).splits == 1, "a window loads few keys"
    assert split_plan(993, 1, 66_000, 8, 2, 64, 2, True, -1, -1, 32).splits == 1
    assert split_plan(992, 1, 66_000, 8, 2, 64, 2, True, -1, -1, 32).splits == 32


def test_the_layout_of_a_schedule_depends_on_splits_and_on_the_mask() -> None:
    def layout(splits: int, window: int, rows: int = 2, *, is_causal: bool = True) -> tuple[tuple[str, ...], int]:
        plan = split_plan(5, rows, 4096, 8, 2, 64, 2, is_causal, window, -1, splits)
        return plan.vectors, plan.size

    assert layout(1, -1) == (("rows", "heads_in_l2"), 17)
    assert layout(32, -1) == (("rows", "splits", "heads_in_l2"), 25)
    assert layout(32, -1, rows=1) == (("rows", "splits"), 17), "one row is causal without a mask"
    assert layout(32, 100, rows=1) == (("rows", "splits", "heads_in_l2"), 25)
    assert layout(32, -1, is_causal=False) == (("rows", "splits"), 17)
