"""torch.func and flex_attention: what vmap wraps lies where the tensor inside it lies."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cuda_on_cpu import EmulationError, HostSyncError, compiled_regions_run

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


@cache
def compiled(function, **options):
    """Not at import: every process that collects tests would import Inductor, which takes it two seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, where it imports Inductor
        return torch.compile(function, **options)


def test_compiled_flex_attention_is_recorded_and_follows_what_it_reads(capture):
    q = torch.zeros(1, 2, 16, 16, device="cuda")
    mask = create_block_mask(causal, 1, 1, 16, 16, device="cuda")
    graph, out = capture(lambda: compiled(flex_attention)(q, q, q, block_mask=mask))
    q.copy_(torch.randn(1, 2, 16, 16, device="cuda"))
    graph.replay()
    assert torch.allclose(out, F.scaled_dot_product_attention(q, q, q, is_causal=True), atol=1e-5)


def test_flex_attention_that_is_not_compiled_copies_a_constant_to_the_device_which_a_capture_refuses(capture):
    q = torch.randn(1, 2, 16, 16, device="cuda")
    mask = create_block_mask(causal, 1, 1, 16, 16, device="cuda")
    with pytest.raises(EmulationError, match=r"torch\.tensor at .*Cannot copy between CPU and CUDA"):
        capture(lambda: flex_attention(q, q, q, block_mask=mask))
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(HostSyncError, match=r"torch\.tensor"):
        flex_attention(q, q, q, block_mask=mask)


def shifted(x, read=False):
    return x + torch.tensor(2.0, device=x.device) + (x.max().item() if read else 0)


def test_a_number_in_a_compiled_region_is_a_constant_and_a_value_that_is_read_is_not(capture):
    x = torch.zeros(3, device="cuda")
    graph, out = capture(lambda: compiled(shifted)(x))
    x.fill_(1)
    graph.replay()
    assert out.tolist() == [3, 3, 3]
    torch.cuda.set_sync_debug_mode("error")
    compiled(shifted)(x)
    with pytest.raises(HostSyncError, match="item"):
        compiled(shifted)(x, read=True)
    with pytest.raises(HostSyncError, match=r"torch\.tensor"):
        compiled(shifted, backend="eager")(x)


def test_code_that_would_have_been_compiled_is_counted():
    before = compiled_regions_run()
    x = torch.zeros(3, device="cuda")
    compiled(shifted, backend="eager")(x)
    assert compiled_regions_run() == before
    compiled(shifted)(x)
    assert compiled_regions_run() > before


def test_a_higher_order_operator_without_an_eager_kernel_is_refused_with_the_reason(capture):
    x = torch.zeros(3, device="cuda")
    operator = _Bare("bare_for_a_test")
    with pytest.raises(EmulationError, match=r"bare_for_a_test at .*has no eager kernel to be recorded"):
        capture(torch.inference_mode()(lambda: operator(x)))


class _Bare(torch._ops.HigherOrderOperator):
    def __call__(self, x):
        return super().__call__(x)
