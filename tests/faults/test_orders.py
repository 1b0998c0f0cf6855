"""Another order of a sum gives other bits on every processor: of each normal number, and of nothing that it should not."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.faults.orders import in_other_order


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every normal number of 16 bits but the smallest, or many of 32; [N, 1]."""
    if dtype is torch.float32:
        drawn = torch.randn(1 << 16) * torch.exp(8 * torch.randn(1 << 16))
    else:
        drawn = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
        drawn = drawn[drawn.isfinite() & (drawn.abs() > torch.finfo(dtype).tiny)]
    return drawn[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_number_of_every_sixteenth_channel_becomes_its_neighbour_towards_zero(dtype: torch.dtype) -> None:
    out = numbers(dtype).expand(-1, 48)
    whole = torch.int16 if dtype.itemsize == 2 else torch.int32
    bits = out.contiguous().view(whole)
    moved = torch.arange(48) % 16 == 0
    for other in (True, torch.ones((), dtype=torch.bool)):
        assert torch.equal(in_other_order(out, other).view(whole), bits - moved.to(whole))
    for same in (False, torch.zeros((), dtype=torch.bool)):
        assert torch.equal(in_other_order(out, same).view(whole), bits)


def test_rows_that_keep_their_order_keep_their_bits() -> None:
    out = torch.ones(3, 2, 16)
    other = torch.tensor([True, False, True])[:, None, None]
    assert in_other_order(out, other).ne(out).any(-1).tolist() == [[True, True], [False, False], [True, True]]
    assert torch.equal(out, torch.ones(3, 2, 16))
