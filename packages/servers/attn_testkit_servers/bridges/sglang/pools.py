"""SGLang's own KV pools, in their own memory: the kit knows only the places of each layer's rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from attn_testkit.contract import KVLayer, KVPool, KVPoolSpec

_RANKS = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "attn_dcp_rank")
_SIZES = ("tp_size", "moe_tp_size", "attn_tp_size", "attn_dp_size", "attn_cp_size", "attn_dcp_size")
_INDEX_DIM = 128
"""Numbers of an index key, in the pool next to the KV rows. No other size exists."""
_made: weakref.WeakKeyDictionary[KVLayer, Any] = weakref.WeakKeyDictionary()
"""First layer of a pool -> SGLang's pool. The kit keeps this layer object as long as its pool exists."""


def set_ranks(**sizes: int) -> None:
    """Make the process the first rank of each kind, because pools and configurations query ranks first.

    ``sizes`` take precedence over the configuration of the server, which has them once it is published.
    """
    get_parallel().clear_stamp()
    get_parallel().override_permanently(**dict.fromkeys(_RANKS, 0), **sizes)


def lay_out(spec: KVPoolSpec) -> Sequence[KVLayer]:
    """Construct SGLang's pool of this size. Every backend of the bridge uses this function as its
    ``AttentionBackend.lay_out_kv_pool``."""
    set_ranks(**dict.fromkeys(_SIZES, 1))
    pool = _constructed(spec)
    if spec.layers[0].is_mla:
        rows = [KVLayer(buffer.view(spec.dtype), buffer=buffer) for buffer in pool.kv_buffer]
    else:
        both = zip(pool.k_buffer, pool.v_buffer, strict=True)
        rows = [KVLayer(keys.view(spec.dtype), values.view(spec.dtype)) for keys, values in both]
    _made[rows[0]] = pool
    return rows


def _constructed(spec: KVPoolSpec) -> Any:
    first = spec.layers[0]
    common: dict[str, Any] = {
        "size": (spec.pages - 1) * spec.page_size, "page_size": spec.page_size, "dtype": spec.dtype,
        "layer_num": len(spec.layers), "device": spec.device.type, "enable_memory_saver": False,
        "start_layer": first.layer_id, "end_layer": first.layer_id + len(spec.layers) - 1,
    }  # fmt: skip
    if not first.is_mla:
        return MHATokenToKVPool(
            head_num=first.tp_k_head_num, head_dim=first.head_dim, v_head_dim=first.v_head_dim,
            enable_alt_stream=False, **common,
        )  # fmt: skip
    common |= {"kv_lora_rank": first.kv_lora_rank, "qk_rope_head_dim": first.head_dim - first.kv_lora_rank}
    if first.topk:
        return DSATokenToKVPool(kv_cache_dim=first.head_dim, index_head_dim=_INDEX_DIM, **common)
    return MLATokenToKVPool(**common)


def over(pool: KVPool) -> Any:
    """SGLang's pool over the memory of a pool of the kit with the layout ``nhd``, which is that of SGLang's pools."""
    made = _constructed(pool.spec)
    for place, layer in enumerate(pool.layers):
        keys, values = pool.get_kv_buffer(layer.layer_id)
        if layer.is_mla:
            made.kv_buffer[place] = keys
        else:
            made.k_buffer[place], made.v_buffer[place] = keys, values
    return made


def pool_of(pool: KVPool) -> Any:
    """SGLang's pool behind the kit's, which it laid out."""
    return _made[next(iter(pool.memory.values()))]
