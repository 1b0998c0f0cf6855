"""FlashAttention 3's two compiled entry points in torch: vLLM's own ``vllm_flash_attn`` calls them as it does a GPU's.

Fixed shapes and device work only. Lengths, offsets and block tables are read when a graph is replayed, and so is the
schedule, which ``get_scheduler_metadata`` makes and vLLM keeps in a buffer of its builder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from attn_testkit_servers.fakes import paged_attention as paged

__all__ = ["FUNCTIONS", "Functions", "fwd", "get_scheduler_metadata"]

Functions = Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]]
"""Name of an operator -> its function, and the arguments that it writes."""

_TILE = 128
"""Query rows of a tile."""
_VECTORS = 4
"""Numbers per request in the schedule; the first is its number of tiles of query rows."""


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads: int, num_heads_k: int, headdim: int,
    headdim_v: int, qkv_dtype: torch.dtype, seqused_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, cu_seqlens_k_new: torch.Tensor | None, seqused_q: torch.Tensor | None,
    leftpad_k: torch.Tensor | None, page_size: int | None, max_seqlen_k_new: int, is_causal: bool,
    window_size_left: int, window_size_right: int, has_softcap: bool, num_splits: int, pack_gqa: bool | None,
    sm_margin: int,
) -> torch.Tensor:  # fmt: skip
    """[1 + 4 * requests, rounded up to 4] int32: a counter, then how many tiles each request has."""
    assert cu_seqlens_q is not None
    assert seqused_k.shape[0] == batch_size
    made = torch.zeros(1 + -(-batch_size // 4) * 4 * _VECTORS, dtype=torch.int32, device=seqused_k.device)
    made[1 : 1 + batch_size] = (cu_seqlens_q.diff() + _TILE - 1) // _TILE
    return made


def fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_new: torch.Tensor | None, v_new: torch.Tensor | None,
    q_v: torch.Tensor | None, out: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None,
    cu_seqlens_k_new: torch.Tensor | None, seqused_q: torch.Tensor | None, seqused_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, page_table: torch.Tensor, kv_batch_idx: torch.Tensor | None,
    leftpad_k: torch.Tensor | None, rotary_cos: torch.Tensor | None, rotary_sin: torch.Tensor | None,
    seqlens_rotary: torch.Tensor | None, q_descale: torch.Tensor | None, k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None, softmax_scale: float, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, is_rotary_interleaved: bool, scheduler_metadata: torch.Tensor | None,
    num_splits: int, pack_gqa: bool | None, sm_margin: int, s_aux: torch.Tensor | None, cp_world_size: int,
    cp_rank: int, cp_tot_seqused_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rows ``q`` [T, H, D] over pages ``k``, ``v`` [blocks, block size, Hk, D]; rows of nobody stay as they were.

    Returns ``out``, the log-sum-exp [H, T] and two empty tensors, as the kernel does.
    """
    assert q_v is None
    assert cu_seqlens_k is None
    assert cp_world_size == 1
    bs, blocks = page_table.shape
    # Rows and keys that a grid of the largest row count and key count reaches.
    blocks = min(blocks, -(-max_seqlen_k // k.shape[1]))
    bounds = torch.arange(bs + 1, dtype=torch.int32, device=q.device) * blocks
    rows = paged.rows_of_requests(cu_seqlens_q, q.shape[0])
    keys = paged.keys_of_pages(bounds, page_table[:, :blocks].reshape(-1), seqused_k, k.shape[1])
    q_lens = cu_seqlens_q.diff()
    seen = (rows.request[:, None] == keys.request[None]) & keys.valid[None] & rows.valid[:, None]
    last = (seqused_k.long() - q_lens.long())[rows.request] + rows.offset
    ahead = keys.offset[None] - last[:, None]
    if is_causal:
        window_size_right = 0
    if window_size_right >= 0:
        seen = seen & (ahead <= window_size_right)
    if window_size_left >= 0:
        seen = seen & (ahead >= -window_size_left)
    found, lse = paged.attend(
        q, paged.gather(k, keys), paged.gather(v, keys), seen, softmax_scale, soft_cap=softcap, round_to=v.dtype,
        sinks=s_aux,
    )  # fmt: skip
    written = rows.valid & (rows.offset < max_seqlen_q)
    if scheduler_metadata is not None:
        written = written & (rows.offset < scheduler_metadata[1 : 1 + bs][rows.request] * _TILE)
    out.copy_(torch.where(written[:, None, None], found.to(out.dtype), out))
    nothing = out.new_empty(0)
    return out, lse.t() * 0.6931471805599453, nothing, nothing.clone()


FUNCTIONS: Functions = {"fwd": (fwd, ("out",)), "get_scheduler_metadata": (get_scheduler_metadata, ())}
"""Functions of ``torch.ops._vllm_fa3_C``."""
