"""The fake of FlashMLA: what it computes, and the schedule that it keeps between calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_testkit_servers.fakes import flash_mla

CPU = torch.device("cpu")
SCALE = 0.05


def _dense(lens: tuple[int, int] = (70, 130), schedule: Any = (None, None), *, is_causal: bool = True) -> Any:
    made = flash_mla._latent(CPU, torch.bfloat16) | {"seqlens_k": torch.tensor(lens, dtype=torch.int32)}
    return made, flash_mla.dense_decode_fwd(
        made["q"], made["kcache"], 512, made["seqlens_k"], made["block_table"], SCALE, is_causal, *schedule, None
    )


def _by_hand(made: dict[str, torch.Tensor], lens: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    q, out, sums = made["q"].double(), torch.zeros(2, 2, 16, 512, dtype=torch.float64), torch.zeros(2, 16, 2)
    for request in range(2):
        rows = made["kcache"][made["block_table"][request].long()].flatten(0, 2).double()
        for row in range(2):
            keys = rows[: lens[request] - 1 + row]
            logits = q[request, row] @ keys.T * SCALE
            out[request, row] = logits.softmax(-1) @ keys[:, :512]
            sums[request, :, row] = logits.logsumexp(-1)
    return out, sums


def test_rows_attend_to_the_keys_of_their_request_aligned_to_the_end() -> None:
    made, (out, lse, *_) = _dense()
    expected, sums = _by_hand(made, (70, 130))
    assert (out.double() - expected).abs().max() < 0.02
    assert (lse - sums).abs().max() < 0.01


def test_a_request_without_keys_gives_zeros_and_an_infinite_sum() -> None:
    _, (out, lse, *_) = _dense((0, 130))
    assert not out[0].any()
    assert bool(lse[0].isposinf().all())
    assert bool(out[1].isfinite().all())


def test_a_schedule_is_used_again_for_lengths_of_as_many_blocks() -> None:
    _, (_, _, *schedule) = _dense((70, 130))
    _, (again, *_) = _dense((100, 150), schedule)
    assert torch.equal(again, _dense((100, 150))[1][0])


def test_a_schedule_for_shorter_requests_leaves_keys_out() -> None:
    _, (_, _, *schedule) = _dense((60, 130))
    _, (stale, *_) = _dense((70, 130), schedule)
    right = _dense((70, 130))[1][0]
    assert not torch.equal(stale[0], right[0]), "70 keys are two blocks, and one was planned"
    assert torch.equal(stale[1], right[1])


@pytest.mark.parametrize("begins", [2, -1])
def test_a_schedule_that_begins_behind_the_last_request_computes_nothing(begins: int) -> None:
    _, (_, _, schedule, splits) = _dense()
    schedule[0, 0] = begins
    assert bool(_dense(schedule=(schedule, splits))[1][0].isnan().all())


def test_scales_of_fp8_multiply_logits_and_values() -> None:
    given = flash_mla._fp8_arguments(CPU, flash_mla.EXTENSION)
    out, lse = flash_mla.fwd_kvcache_mla_fp8(**given)
    scaled = given | {"softmax_scale": given["softmax_scale"] * 0.5, "descale_k": torch.ones(1)}
    plain, sums = flash_mla.fwd_kvcache_mla_fp8(**scaled)
    assert torch.equal(lse, sums)
    assert (out.double() - plain.double() / 2).abs().max() < 0.01


def test_fp8_rounds_probabilities_without_a_factor_so_that_small_ones_vanish() -> None:
    given = flash_mla._fp8_arguments(CPU, flash_mla.EXTENSION)
    given["kcache"].zero_()
    given["q"].zero_()
    q, keys = (given[name].float() for name in ("q", "kcache"))
    # One large logit, and as many of e^-8 as make up a fiftieth of the sum: e4m3 has no number below 2^-10.
    q[..., 0], keys[:, 0, :, 0], keys[:, 1:, :, 1] = 1.0, 8.0, 1.0
    keys[given["block_table"][:, 0].long(), 0, :, 0] = 8.0
    keys[given["block_table"][:, 1:].long().flatten(), 0, :, 0] = 0.0
    ones = torch.ones(1)
    changed = given | {"q": q.to(given["q"].dtype), "kcache": keys.to(given["kcache"].dtype)}
    out, _ = flash_mla.fwd_kvcache_mla_fp8(**changed | {"softmax_scale": 1.0, "descale_q": ones, "descale_k": ones})
    assert not out[..., 1].any(), "the values of the small weights are not there"


def test_sparse_rows_attend_to_the_slots_that_they_name_and_to_no_other() -> None:
    given = flash_mla._sparse_arguments(CPU, None) | {"attn_sink": None}
    out, top, lse = flash_mla.sparse_prefill_fwd(**given)
    for row, length in enumerate((128, 120, 64)):
        named = [int(slot) for slot in given["indices"][row, 0, :length] if slot >= 0]
        keys = given["kv"][named, 0].double()
        logits = given["q"][row].double() @ keys.T * SCALE
        assert (out[row].double() - logits.softmax(-1) @ keys[:, :512]).abs().max() < 0.02
        assert (lse[row] - logits.logsumexp(-1)).abs().max() < 0.01
        assert (top[row] - logits.amax(-1)).abs().max() < 0.01


def test_a_sink_takes_its_share_and_leaves_the_sums_alone() -> None:
    given = flash_mla._sparse_arguments(CPU, None)
    out, _, lse = flash_mla.sparse_prefill_fwd(**given)
    plain, _, sums = flash_mla.sparse_prefill_fwd(**given | {"attn_sink": None})
    assert torch.equal(lse, sums)
    share = torch.sigmoid(lse - given["attn_sink"])[..., None]
    assert (out.float() - plain.float() * share).abs().max() < 0.02


def test_a_sparse_row_without_a_slot_is_zero() -> None:
    given = flash_mla._sparse_arguments(CPU, None)
    given["indices"][1] = -1
    out, _, lse = flash_mla.sparse_prefill_fwd(**given)
    assert not out[1].any()
    assert bool(lse[1].isposinf().all())
