"""Data patterns: their size, and what each is for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attn_testkit.cases.normals import normals
from attn_testkit.steps.patterns import draw, mark_keys, marked_keys, probe_values

Q, K, V = (2, 300, 4, 64), (2, 3, 100, 2, 64), (2, 3, 100, 2, 32)


def drawn(pattern: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw(pattern, Q, K, V, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("pattern", "means", "spreads"),
    [
        ("gauss", (0, 0, 0), (1, 1, 1)),
        ("shifted", (0.25, 1, 3), (1, 1, 1)),
        ("peaked", (0, 0, 0), (6, 1, 1)),
        ("mean", (0, 0, 0), (0, 0, 1)),
        ("one_hot", (0, 0, 0), (0.5, 1, 0)),
    ],
)
def test_numbers_have_the_mean_and_the_spread_that_make_the_pattern(
    pattern: str, means: tuple[float, ...], spreads: tuple[float, ...]
) -> None:
    tensors = drawn(pattern)
    assert [x.shape for x in tensors] == [Q, K, V]
    assert all(x.dtype == torch.float32 for x in tensors)
    for x, mean, spread in zip(tensors, means, spreads, strict=True):
        assert float(x.mean()) == pytest.approx(mean, abs=0.05 * max(1, spread))
        assert float(x.std()) == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("dim", [64, 128, 576])
def test_negative_logits_are_all_the_same_and_far_below_a_finite_minus_infinity(dim: int) -> None:
    q, k, _ = draw("negative", (1, 2, 1, dim), (1, 1, 5, 1, dim), (1, 1, 5, 1, 8), np.random.default_rng(0))
    for factor in (0.5, 1.5):
        logits = (q[0, :, 0] @ k[0, 0, :, 0].T) * factor / math.sqrt(dim)
        assert len(logits.unique()) == 1
        assert -1.5e5 < float(logits[0, 0]) < -2.5e4
    assert float(q.abs().max()) < torch.finfo(torch.float16).max
    # Scaled queries make equal terms inexact, and the errors of many equal terms do not cancel.
    assert 64 <= int((k[0, 0, 0, 0] != 0).sum()) < 128


def test_a_cliff_climbs_for_one_row_and_falls_for_the_next() -> None:
    q, k, _ = drawn("rising_logits")
    logits = torch.einsum("thd,shd->ths", q[0, :4, :2], k[0, 0]) / math.sqrt(64)
    rise = logits[..., -1] - logits[..., 0]
    assert ((rise.abs() > 180) & (rise.abs() < 220)).all(), "0.5 of it in the first layer, 1.5 in the second"
    assert (rise.sign() == torch.tensor([[1, -1], [-1, 1], [1, -1], [-1, 1]])).all()


@pytest.mark.parametrize("length", [1, 2, 63, 64])
def test_every_key_is_marked_where_there_are_channels_enough(length: int) -> None:
    marked = marked_keys(length, 64, np.random.default_rng(1))
    assert sorted(marked.tolist()) == list(range(length))


@pytest.mark.parametrize("length", [65, 66, 100, 4096])
def test_the_last_half_and_the_first_quarter_are_marked_where_there_are_not(length: int) -> None:
    marked = marked_keys(length, 64, np.random.default_rng(1)).tolist()
    assert len(set(marked)) == 64
    assert set(range(length - 32, length)) <= set(marked)
    assert set(range(16)) <= set(marked)
    assert set(marked) <= set(range(length))
    others = set(marked) - set(range(16)) - set(range(length - 32, length))
    assert len(others) == 16


def test_every_head_marks_keys_within_its_requests_length() -> None:
    v = torch.zeros(2, 2, 9, 2, 4)
    mark_keys(v, [3, 9], np.random.default_rng(0))
    assert v[:, 0, 3:].eq(0).all()
    assert v[:, 0].sum(1).eq(torch.tensor([1, 1, 1, 0])).all()
    assert v[:, 1].sum(1).eq(1).all()
    assert v.unique().tolist() == [0, 1]


def test_a_probe_carries_one_key_a_channel_from_its_start_on() -> None:
    v = probe_values(torch.full((2, 2, 9, 2, 4), 7.0), "probe.1.6")
    assert v[:, 0].eq(0).all()
    assert v[0, 1, :, 0].nonzero().tolist() == [[6, 0], [7, 1], [8, 2]]
    assert v.unique().tolist() == [0, 1], "what comes back is a weight"
    assert probe_values(torch.ones(2, 2, 9, 2, 4), "probe.1.5")[0, 1, :, 0].nonzero().tolist()[-1] == [8, 3]
    for nothing in ("probe.1.9", "probe.2.0"):
        assert probe_values(torch.ones(2, 2, 9, 2, 4), nothing).eq(0).all()


def test_normals_come_from_a_bank_and_more_of_them_than_it_holds_do_not_repeat_in_order() -> None:
    first, again = (normals((1000,), np.random.default_rng(3)) for _ in range(2))
    assert torch.equal(first, again)
    size = 2 * (1 << 20) - 1
    many = normals((size,), np.random.default_rng(3))
    assert len(many) == size
    assert float(many.std()) == pytest.approx(1, rel=0.01)
    assert len(many[: 1 << 18].unique()) > 1 << 17
    assert not torch.equal(many[: 1 << 18], many[-(1 << 18) :])


def test_keys_whose_index_lost_its_upper_bits_are_others() -> None:
    keys = normals((66_100, 2, 64), np.random.default_rng(3))
    for bits in range(10, 17):
        same = (keys[1 << bits :] == keys[: -(1 << bits)]).flatten(1).all(1)
        assert not same.any(), f"2^{bits} keys apart"


@pytest.mark.parametrize("size", [(1 << 20) + 1, (1 << 21) - 1, 5_000_000])
def test_many_normals_are_every_seventh_of_the_bank_in_rounds_of_an_odd_length(size: int) -> None:
    period = 1 << 21
    start = int(np.random.default_rng(3).integers(0, 1 << 20)) * pow(7, -1, period) % period
    bank = torch.from_numpy(np.random.default_rng(20260101).standard_normal(period, dtype=np.float32))
    strided = bank[torch.arange(period) * 7 % period]
    round_ = period if start + size <= period else period - 1
    assert torch.equal(normals((size,), np.random.default_rng(3)), strided[(torch.arange(size) + start) % round_])
