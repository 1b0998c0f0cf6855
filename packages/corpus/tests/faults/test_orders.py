"""Another order of a sum gives other bits on every processor: of each small number of a row, and of nothing else."""

from __future__ import annotations

import pytest
import torch

from attn_testkit_corpus.faults.orders import in_other_order


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every normal number of 16 bits but the smallest, or many of 32."""
    if dtype is torch.float32:
        drawn = torch.randn(1 << 16) * torch.exp(8 * torch.randn(1 << 16))
    else:
        drawn = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
        drawn = drawn[drawn.isfinite() & (drawn.abs() > torch.finfo(dtype).tiny)]
    return drawn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_small_number_of_a_row_becomes_the_next_one_towards_zero(dtype: torch.dtype) -> None:
    few = numbers(dtype)
    few = few[few.abs() < torch.finfo(dtype).max / 16]
    out = torch.stack([few, 8 * few, 7 * few], -1)
    whole = torch.int16 if dtype.itemsize == 2 else torch.int32
    moved = torch.tensor([1, 0, 0], dtype=whole)
    for other in (True, torch.ones((), dtype=torch.bool)):
        assert torch.equal(in_other_order(out, other).view(whole), out.view(whole) - moved)
    for same in (False, torch.zeros((), dtype=torch.bool)):
        assert torch.equal(in_other_order(out, same).view(whole), out.view(whole))


def test_rows_that_keep_their_order_keep_their_bits() -> None:
    out = torch.tensor([1.0, 8.0]).expand(3, 2, 2)
    other = torch.tensor([True, False, True])[:, None, None]
    assert in_other_order(out, other).ne(out).any(-1).tolist() == [[True, True], [False, False], [True, True]]
