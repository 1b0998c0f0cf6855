"""KV groups: sets of layers that share KV memory, in models with several such sets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .batch import ForwardBatch
from .kv_pool import KVPool

__all__ = ["KVGroup"]


@dataclass(frozen=True, eq=False)
class KVGroup:
    """Layers with their own pool, request table and slots. Servers have separate groups for windowed and full layers.

    Request rows, lengths and offsets are those of the batch, for all groups. A group of windowed layers has freed the
    pages that no row of the step sees: the request table still lists them, and they hold finite values of any request.
    Cross-attention layers may be a group, too (``CrossAttention``): its table has the encoder keys of each request, and
    ``ForwardBatch.encoder_lens`` their number.
    Such a page may have been reused as a later page of the same request; then the row has it twice (vLLM #30915).
    """

    index: int
    """Index in ``BackendContext.groups``."""
    layer_ids: tuple[int, ...]
    """Ids of the group's layers."""
    kv_pool: KVPool
    """Pool of these layers only."""
    req_to_token: torch.Tensor
    """[pool_size + 1, max_context_len] int32: as ``BackendContext.req_to_token``, in slots of this group's pool."""

    def cache_loc(self, batch: ForwardBatch) -> torch.Tensor:
        """[T] int64: KV slot of each new token in this group's pool; a view of the batch's tensor."""
        # The view of a replay has the attribute only if there are groups.
        locs = getattr(batch, "group_cache_locs", None)
        return batch.out_cache_loc if locs is None else locs[self.index]
