"""torch.func and flex_attention: what vmap wraps lies where the tensor inside it lies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attn_testkit.emulation import EmulationError

pytestmark = [
    pytest.mark.usefixtures("cuda"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def test_vmap_of_device_tensors_gives_device_tensors():
    a, b = torch.randn(4, 3, device="cuda"), torch.randn(3, 5, device="cuda")
    out = torch.vmap(lambda row: row @ b + torch.zeros(5, device=row.device))(a)
    assert out.is_cuda
    assert torch.allclose(out, a @ b)
    twice = torch.vmap(torch.vmap(lambda x, y: x * y, in_dims=(0, None)), in_dims=(None, 0))(a[0], a[1])
    assert twice.is_cuda
    assert torch.equal(twice, a[1][:, None] * a[0])


def test_vmap_is_recorded(capture):
    x, b = torch.zeros(4, 3, device="cuda"), torch.randn(3, 5, device="cuda")
    torch.vmap(lambda row: row @ b)(x)
    graph, out = capture(lambda: torch.vmap(lambda row: row @ b)(x))
    x.copy_(torch.randn(4, 3, device="cuda"))
    graph.replay()
    assert torch.allclose(out, x @ b)


def test_a_host_tensor_in_a_vmap_is_still_one():
    a, host = torch.randn(4, 3, device="cuda"), torch.randn(3)
    with pytest.raises(EmulationError, match="at least two devices"):
        torch.vmap(lambda row: row + host)(a)
    assert not torch.vmap(lambda row: row + 1)(torch.randn(4, 3)).is_cuda


def causal(batch, head, query, key):
    return query >= key


def test_flex_attention_runs():
    q = torch.randn(1, 2, 16, 16, device="cuda")
    mask = create_block_mask(causal, 1, 1, 16, 16, device="cuda")
    out = flex_attention(q, q, q, block_mask=mask)
    assert out.is_cuda
    assert torch.allclose(out, F.scaled_dot_product_attention(q, q, q, is_causal=True), atol=1e-5)


def test_a_captured_flex_attention_is_refused_with_the_reason(capture):
    q = torch.randn(1, 2, 16, 16, device="cuda")
    mask = create_block_mask(causal, 1, 1, 16, 16, device="cuda")
    with pytest.raises(EmulationError, match=r"flex_attention at .*the emulation records no higher-order operator"):
        capture(lambda: flex_attention(q, q, q, block_mask=mask))
