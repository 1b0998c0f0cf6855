"""The fake of FlashAttention 3: what it computes, and that it keeps the splits of a capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_testkit_servers.fakes.flash_attn import forward_arguments, fwd, get_scheduler_metadata, metadata_arguments
from attn_testkit_servers.fakes.flash_attn_plan import split_plan

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, PAGE, REQUESTS = 4, 2, 64, 16, 2


CPU = torch.device("cpu")


def _schedule(lens: torch.Tensor, starts: torch.Tensor, most_rows: int, most_keys: int, splits: int) -> torch.Tensor:
    given = {"seqused_k": lens, "cu_seqlens_q": starts, "max_seqlen_q": most_rows, "max_seqlen_k": most_keys}
    return get_scheduler_metadata(**metadata_arguments(CPU) | given | {"num_splits": splits})


def _arguments(lens: list[int], most_keys: int, dtype: torch.dtype = BF16) -> dict[str, Any]:
    """One row for the first request, two for the second, and a page table with room for ``most_keys`` keys."""
    given = forward_arguments(CPU, most_keys=most_keys, dtype=dtype)
    return given | {"seqused_k": torch.tensor(lens, dtype=torch.int32)}


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


def test_fp8_probabilities_are_multiplied_before_they_are_rounded_so_that_small_ones_stay() -> None:
    given = _arguments([9, 33], 48, FP8)
    q, k, v = (torch.zeros(given[x].shape) for x in "qkv")
    first = given["page_table"][:, 0].long()
    # One logit of 7; the others have the weight exp(-7), which e4m3 does not hold, and are the only ones with values.
    q[..., 0], k[first, 0, :, 0], v[..., 1] = 1.0, 56.0, 1.0
    v[first, 0, :, 1] = 0.0
    found = fwd(**given | {name: x.to(FP8) for name, x in zip("qkv", (q, k, v), strict=True)})[0]
    small = torch.tensor([8.0, 31.0, 32.0]) * torch.tensor(-7.0).exp()
    assert torch.allclose(found[..., 1].float(), (small / (1 + small))[:, None].expand(3, HEADS), rtol=0.07)


def test_a_replay_for_which_the_heuristic_chooses_other_splits_writes_no_row() -> None:
    assert split_plan(REQUESTS, 2, 64, HEADS, KV_HEADS, DIM, 2, True, -1, -1, 0).splits == 1
    assert split_plan(REQUESTS, 2, LONG, HEADS, KV_HEADS, DIM, 2, True, -1, -1, 0).splits > 1
    assert _replayed(LONG, LONG, 0).all()
    assert not _replayed(LONG, 64, 0).any(), "the schedule of a replay lacks the vector of splits"
    assert not _replayed(64, LONG, 0).any(), "and here the captured launch has no second kernel"


def test_a_number_of_splits_that_the_server_gives_holds_for_every_replay() -> None:
    assert _replayed(LONG, 64, 32).all()
    assert _replayed(LONG, LONG, 32).all()


def test_fp8_needs_head_dims_in_steps_of_16_and_outputs_in_bf16() -> None:
    given = _arguments([9, 33], 48, FP8)
    narrow = {x: given[x][..., :56] for x in ("q", "k", "v", "out")}
    with pytest.raises(RuntimeError, match="head_size should be a multiple of"):
        fwd(**given | narrow)
    with pytest.raises(RuntimeError, match="For FP8 input, output must have dtype BF16"):
        fwd(**given | {"out": given["out"].half()})


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


def test_scales_are_not_looked_at_without_fp8() -> None:
    given = _arguments([9, 33], 48)
    fwd(**given)
    plain = given["out"].clone()
    fwd(**given | {"k_descale": torch.ones(7)})
    assert torch.equal(given["out"], plain)
