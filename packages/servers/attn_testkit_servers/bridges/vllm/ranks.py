"""Decode context parallelism (DCP) of vLLM 0.33.0: one rank of it, with vLLM's own objects and without collectives.

The kit gathers the queries of all ranks and merges their results. Everything else of a rank is here: the group that
constructors ask for world size and rank, the manager of collectives that builders want from a layer, the lengths on the
rank, and what vLLM does with a rank without keys before it merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.v1.attention.ops.dcp import MLADCPManager, mask_dcp_empty_shards_
from vllm.v1.worker.gpu.cp_utils import prepare_dcp_local_seq_lens

from attn_testkit.contract import AttentionLayer, BackendContext


@dataclass(frozen=True)
class _Group:
    """A ``GroupCoordinator`` with only the attributes that constructors read. It is a key of vLLM's caches."""

    world_size: int
    rank_in_group: int
    device_group: None = None
    """No process group: a collective that is called after all raises an error."""


def become_rank(context: BackendContext) -> None:
    """Set the DCP group of the process to the rank of an instance that is constructed next; to none without ranks."""
    ranks = context.dcp_world_size
    parallel_state._DCP = _Group(ranks, context.dcp_rank) if ranks > 1 else None


def heads_of_rank(context: BackendContext, layer: AttentionLayer) -> int:
    """Query heads of a layer before queries are gathered. A server has the same number on all ranks."""
    return -(-layer.tp_q_head_num // context.dcp_world_size)


def make_manager(config: Any, device: torch.device, made: Any) -> Any:
    """The manager of collectives of the layer ``made``, as ``MLAAttention.__init__`` makes it; None without ranks."""
    if made.impl.dcp_world_size == 1:
        return None
    dtype = config.model_config.dtype
    return MLADCPManager(
        vllm_config=config, device=device, num_heads=made.num_heads, query_head_dim=made.head_size,
        output_head_dim=made.kv_lora_rank, query_dtype=dtype, output_dtype=dtype, padded_num_heads=None,
        is_lse_base_on_e=made.impl.lse_base_on_e, use_pcp=False,
    )  # fmt: skip


def fill_local_lens(context: BackendContext, buffers: Any, num_reqs: int) -> None:
    """Fill ``buffers.dcp_local_seq_lens`` from ``buffers.seq_lens``, as the model runner does before each step; nothing
    without ranks."""
    if context.dcp_world_size > 1:
        prepare_dcp_local_seq_lens(
            buffers.dcp_local_seq_lens, buffers.seq_lens, num_reqs, context.dcp_world_size, context.dcp_rank,
            context.cp_kv_cache_interleave_size,
        )  # fmt: skip


def without_empty_rows(out: torch.Tensor, lse: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Result of a rank as it weighs in vLLM's merge: rows of requests without keys on it have -inf and zeros.

    The kernel leaves anything there. ``MLADCPManager.combine`` masks the log-sum-exp (``mask_dcp_empty_shards_``), and
    its kernel writes zeros instead of an output of weight 0.
    """
    mask_dcp_empty_shards_(lse, metadata.decode.seq_lens, metadata.query_start_loc[: metadata.num_decodes + 1])
    return out.masked_fill((lse == -torch.inf)[..., None], 0.0), lse
