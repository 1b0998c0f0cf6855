"""Fakes of FlashInfer's kernels of the gated delta rule, ``flashinfer.gdn_decode`` and ``flashinfer.gdn_prefill``.

On SM90 the package compiles them with CuTe DSL. ``flashinfer.gdn_prefill`` does not import without it, so its fake is
bound to the signature in the package's source.
"""

from __future__ import annotations

from typing import Any

import torch


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
    """States behind each token, and outputs [B, T, HV, V] in float32; q, k, v [B, T, heads, width]."""
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


def _pool_of(
    state: torch.Tensor | None, initial_state: torch.Tensor | None, indices: torch.Tensor | None, requests: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool [slots, HV, V, K] and index of each request. A state without a pool has a slot for each request."""
    if initial_state is not None:
        assert indices is not None, "initial_state and initial_state_indices must be provided together"
        return initial_state, indices.long()
    assert state is not None, "Either state or initial_state must be provided"
    return state, torch.arange(requests, device=state.device)


def _store(pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
    """Store rows in the slots of an index from 0 on; the first slot gets back what it holds otherwise."""
    live = index >= 0
    index, live = index.clamp(min=0), live.view(-1, *[1] * (rows.dim() - 1))
    pool.index_put_((index,), torch.where(live, rows.to(pool.dtype), pool[index]))


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor | None, A_log: torch.Tensor,
    a: torch.Tensor, dt_bias: torch.Tensor, b: torch.Tensor, scale: float | None, output: torch.Tensor | None,
    use_qk_l2norm: bool, initial_state: torch.Tensor | None, initial_state_indices: torch.Tensor | None,
    output_state_indices: torch.Tensor | None, intermediate_states_buffer: torch.Tensor | None,
    disable_state_update: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``gated_delta_rule_decode_pretranspose``. An index of -1 is slot 0 for bf16 states, and skipped for fp32 ones."""
    assert output is None, "the fake allocates its output"
    assert output_state_indices is None, "the fake writes the slot that it reads"
    requests, tokens, _, width = q.shape
    if tokens == 1 and (intermediate_states_buffer is not None or disable_state_update):
        raise ValueError("intermediate_states_buffer and disable_state_update are supported only for T > 1")
    pool, index = _pool_of(state, initial_state, initial_state_indices, requests)
    half = pool.dtype == torch.bfloat16 and width == v.shape[-1] == 128
    if half:
        index = index.clamp(min=0)
    elif tokens > 1:
        assert initial_state is not None, "fp32 states with T > 1 need initial_state"
        assert initial_state_indices is not None
        return verify(
            q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale, output,
            intermediate_states_buffer, None, disable_state_update, use_qk_l2norm,
        )  # fmt: skip
    assert pool.dtype == torch.bfloat16 or (pool.dtype == torch.float32 and min(width, v.shape[-1]) >= 128)
    behind, read = _tokens(
        pool[index.clamp(min=0)].float(), q, k, v, A_log, a, dt_bias, b, scale, use_qk_l2norm
    )  # fmt: skip
    if intermediate_states_buffer is not None:
        assert len(intermediate_states_buffer) == requests, "intermediate_states_buffer dim 0 must equal batch size"
        intermediate_states_buffer[:, :tokens] = torch.stack(behind, 1).to(pool.dtype)
    if not disable_state_update:
        _store(pool, behind[-1], index)
    read = read.masked_fill((index < 0)[:, None, None, None], 0.0)
    return read.bfloat16().to(q.dtype), pool


def verify(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor, A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor,
    b: torch.Tensor, scale: float | None, output: torch.Tensor | None,
    intermediate_states_buffer: torch.Tensor | None, ssm_state_indices: torch.Tensor | None,
    disable_state_update: bool | None, use_qk_l2norm: bool, *further: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``gated_delta_rule_mtp``: states in float32, behind each token in a buffer, or in slots of the pool."""
    assert not any(each is not None and each is not False for each in further), "the fake has no such argument"
    requests, tokens = q.shape[:2]
    assert initial_state.dtype == torch.float32, f"initial_state must be float32, got {initial_state.dtype}"
    index = initial_state_indices.long()
    behind, read = _tokens(
        initial_state[index.clamp(min=0)], q, k, v, A_log, a, dt_bias, b, scale, use_qk_l2norm
    )  # fmt: skip
    live = index >= 0
    if intermediate_states_buffer is not None:
        assert intermediate_states_buffer.is_contiguous(), "intermediate_states_buffer must be contiguous"
        kept, new = intermediate_states_buffer[:requests, :tokens], torch.stack(behind, 1)
        kept.copy_(torch.where(live.view(-1, 1, 1, 1, 1), new, kept))
    if ssm_state_indices is not None:
        assert intermediate_states_buffer is None, "ssm_state_indices and intermediate_states_buffer exclude each other"
        assert disable_state_update is False, "ssm_state_indices needs state updates"
        assert tokens >= 2, "ssm_state_indices requires T >= 2"
        for token, state in enumerate(behind):
            _store(initial_state, state, torch.where(live, ssm_state_indices[:, token].long(), -1))
    elif disable_state_update is False:
        _store(initial_state, behind[-1], index)
    read = read.masked_fill(~live[:, None, None, None], 0.0)
    return read.bfloat16().to(q.dtype), initial_state


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
    assert output_final_state, "the fake returns states"
    assert state_checkpoints is None, "the fake has no checkpoints"
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
