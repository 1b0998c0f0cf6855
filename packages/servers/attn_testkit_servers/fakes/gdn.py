"""Fakes of FlashInfer's kernels of the gated delta rule, ``flashinfer.gdn_decode`` and ``flashinfer.gdn_prefill``.

On SM90 the package compiles them with CuTe DSL. The package's Python of ``gdn_decode`` runs, with its checks, over
kernels in torch. ``flashinfer.gdn_prefill`` does not import without CuTe DSL, so its fake is bound to the signature in
the package's source, and its checks are not the package's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from attn_testkit.backends.vendor.provider import swapped


def _token(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States [B, HV, V, K] after one token of each request, and what it reads [B, HV, V]; all in float32."""
    ratio = v.shape[1] // k.shape[1]
    q, k = (each.repeat_interleave(ratio, 1) for each in (q, k))
    state = state * decay[..., None, None]
    stored = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
    state = state + stored[..., None] * k[..., None, :]
    return state, (state * q[..., None, :]).sum(-1)


def _normalized(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def _tokens(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, A_log: torch.Tensor, a: torch.Tensor,
    dt_bias: torch.Tensor, b: torch.Tensor, scale: float | None, use_qk_l2norm: bool,
) -> tuple[list[torch.Tensor], torch.Tensor]:  # fmt: skip
    """States after each token, and outputs [B, T, HV, V] in float32; q, k, v [B, T, heads, width]."""
    q, k, v = q.float(), k.float(), v.float()
    if use_qk_l2norm:
        q, k = _normalized(q), _normalized(k)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    decay = torch.exp(-A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias.float()))
    behind, read = [], []
    for token in range(q.shape[1]):
        rows = (each[:, token] for each in (q, k, v, decay, torch.sigmoid(b.float())))
        state, out = _token(state, *rows)
        behind.append(state)
        read.append(out)
    return behind, torch.stack(read, 1)


def _store(pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
    """Store rows in the slots of an index from 0 on; the first slot keeps its contents."""
    live = index >= 0
    index, live = index.clamp(min=0), live.view(-1, *[1] * (rows.dim() - 1))
    pool.index_put_((index,), torch.where(live, rows.to(pool.dtype), pool[index]))


def _half_states(
    *, A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    b: torch.Tensor, initial_state_source: torch.Tensor, initial_state_indices: torch.Tensor,
    output_state_indices: torch.Tensor | None, use_qk_l2norm_in_kernel: bool, scale: float,
    output: torch.Tensor | None, intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """The kernels for states in bf16, which write in bf16 and use slot 0 for an index of -1."""
    requests, tokens = q.shape[:2]
    if intermediate_states_buffer is not None:
        # Checked by the Python around the kernel (gdn_decode_bf16_state.py), which does not import without CuTe DSL.
        assert len(intermediate_states_buffer) == requests, "intermediate_states_buffer dim 0 must equal batch size"
        assert intermediate_states_buffer.dtype == torch.bfloat16
    index = initial_state_indices.long().clamp(min=0)
    behind, read = _tokens(
        initial_state_source[index].float(), q, k, v, A_log, a, dt_bias, b, scale, use_qk_l2norm_in_kernel
    )  # fmt: skip
    if intermediate_states_buffer is not None:
        intermediate_states_buffer[:, :tokens] = torch.stack(behind, 1).to(torch.bfloat16)
    if not disable_state_update:
        _store(initial_state_source, behind[-1], _written(index, output_state_indices).clamp(min=0))
    out = torch.empty_like(read, dtype=torch.bfloat16) if output is None else output
    return out.copy_(read)


def _written(index: torch.Tensor, output_state_indices: torch.Tensor | None) -> torch.Tensor:
    return index if output_state_indices is None else output_state_indices.long()


def _one_token(
    h0_source: torch.Tensor, A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, b: torch.Tensor, output: torch.Tensor, requests: int, tokens: int, heads: int,
    v_heads: int, k_dim: int, v_dim: int, scale: float, use_qk_l2norm: bool, *, use_pool_indexing: bool,
    initial_state_indices: torch.Tensor | None, output_state_indices: torch.Tensor | None,
) -> None:  # fmt: skip
    """The kernel for states in fp32 and one token; a request with an index of -1 is skipped and reads zeros."""
    pool, index = h0_source, initial_state_indices
    if not use_pool_indexing or index is None:
        pool, index = h0_source.view(requests, v_heads, v_dim, k_dim), torch.arange(requests, device=q.device)
    index = index.long()
    behind, read = _tokens(pool[index.clamp(min=0)], q, k, v, A_log, a, dt_bias, b, scale, use_qk_l2norm)
    _store(pool, behind[-1], torch.where(index < 0, -1, _written(index, output_state_indices)))
    output.copy_(read.masked_fill((index < 0)[:, None, None, None], 0.0))


def _several_tokens(
    h0_source: torch.Tensor, intermediate_states: torch.Tensor, A_log: torch.Tensor, a: torch.Tensor,
    dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor, output: torch.Tensor,
    initial_state_indices: torch.Tensor, requests: int, tokens: int, heads: int, v_heads: int, k_dim: int, v_dim: int,
    pool_size: int, cache_steps: int, tile_v: int, vec_size: int, scale: float, use_qk_l2norm: bool,
    disable_state_update: bool, cache_intermediate_states: bool, *, ssm_state_indices: torch.Tensor | None,
    output_state_indices: torch.Tensor | None, cache_replayssm: bool, **_: Any,
) -> None:  # fmt: skip
    """The kernel for states in fp32 and drafts: states after each token in a buffer, or in slots of the pool."""
    assert not cache_replayssm, "the fake does not support ReplaySSM"
    pool = h0_source.view(pool_size, v_heads, v_dim, k_dim)
    index = initial_state_indices.long()
    behind, read = _tokens(pool[index.clamp(min=0)], q, k, v, A_log, a, dt_bias, b, scale, use_qk_l2norm)
    live = index >= 0
    if cache_intermediate_states:
        kept = intermediate_states.view(-1, cache_steps, v_heads, v_dim, k_dim)[:requests, :tokens]
        kept.copy_(torch.where(live.view(-1, 1, 1, 1, 1), torch.stack(behind, 1), kept))
    if ssm_state_indices is not None:
        for token, state in enumerate(behind):
            _store(pool, state, torch.where(live, ssm_state_indices[:, token].long(), -1))
    elif not disable_state_update:
        _store(pool, behind[-1], torch.where(live, _written(index, output_state_indices), -1))
    output.copy_(read.masked_fill(~live[:, None, None, None], 0.0))


_TILE = 8
"""A divisor of the real tile's columns: the package's Python only checks whether a width can be divided by the tile."""


def _over_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``flashinfer.gdn_decode`` over kernels that compute in torch."""
    module = "flashinfer.gdn_decode"
    fakes = {
        f"{module}:_gated_delta_rule_bf16_state": _half_states,
        f"{module}:_gated_delta_rule_bf16_state_mtp": _half_states,
        f"{module}:_GDN_DECODE_BF16_STATE_AVAILABLE": True,
        f"{module}:_CAKE_GDN_AVAILABLE": False,
        f"{module}:run_pretranspose_decode": _one_token,
        f"{module}:run_mtp_decode": _several_tokens,
        f"{module}:get_tile_v_mtp": lambda *_, **__: _TILE,
        f"{module}:get_vec_size_mtp": lambda *_, **__: _TILE,
    }

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with swapped(fakes):
            return original(*args, **kwargs)

    return call


def make_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    """``gated_delta_rule_decode_pretranspose`` over kernels that compute in torch."""
    return _over_kernels(original)


def make_verify(original: Callable[..., Any]) -> Callable[..., Any]:
    """``gated_delta_rule_mtp`` over kernels that compute in torch."""
    return _over_kernels(original)


def prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None,
    scale: float | None, initial_state: torch.Tensor | None, output_final_state: bool,
    cu_seqlens: torch.Tensor | None, use_qk_l2norm_in_kernel: bool, output: torch.Tensor | None,
    output_state: torch.Tensor | None, state_checkpoints: torch.Tensor | None,
    checkpoint_cu_starts: torch.Tensor | None, checkpoint_every_n_tokens: int, use_cp: Any,
    state_indices: torch.Tensor | None, *further: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``chunk_gated_delta_rule``: ``g`` is the decay, not its logarithm; q and k are normalized in their dtype."""
    assert g is not None
    assert beta is not None
    assert cu_seqlens is not None
    assert initial_state is not None
    assert output_final_state, "the fake always returns states"
    assert state_checkpoints is None, "the fake does not support checkpoints"
    assert g.dtype == beta.dtype == torch.float32, "g and beta must be float32"
    if use_qk_l2norm_in_kernel:
        q, k = (_normalized(each.float()).to(each.dtype) for each in (q, k))
    factor = scale or q.shape[-1] ** -0.5
    out = torch.empty(len(q), *v.shape[1:], dtype=q.dtype, device=q.device) if output is None else output
    states = torch.empty_like(initial_state, dtype=torch.float32) if output_state is None else output_state
    slots = torch.arange(len(cu_seqlens) - 1, device=q.device) if state_indices is None else state_indices.long()
    behind = initial_state[slots].float()
    requests = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(len(q), device=q.device), right=True)
    for row in range(len(q)):
        request, part = requests[row : row + 1], slice(row, row + 1)
        rows = (q[part].float() * factor, k[part].float(), v[part].float(), g[part], beta[part])
        state, read = _token(behind[request], *rows)
        behind.index_copy_(0, request, state)
        out[part] = read.to(out.dtype)
    states[slots] = behind.to(states.dtype)
    return out, states
