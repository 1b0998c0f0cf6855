"""Layers that share KV memory, where not all of a model do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .batch import ForwardBatch
from .kv_pool import KVPool

__all__ = ["KVGroup"]


@dataclass(frozen=True, eq=False)
class KVGroup:
    """Layers with a pool, a request table and slots of their own, as servers give windowed layers beside full ones.

    Request rows, lengths and offsets are those of the batch, for all groups. A group of windowed layers has let go of
    pages that no row of the step sees: the request table still names them, and they hold finite numbers of anybody.
    One of them may have come back as a later page of the same request: it stands twice in the row then (vLLM #30915).
    """

    index: int
    """Place in ``BackendContext.groups``."""
    layer_ids: tuple[int, ...]
    kv_pool: KVPool
    """Of these layers alone."""
    req_to_token: torch.Tensor
    """[pool_size + 1, max_context_len] int32: as ``BackendContext.req_to_token``, in slots of this group's pool."""

    def cache_loc(self, batch: ForwardBatch) -> torch.Tensor:
        """[T] int64: KV slot of each new token in this group's pool; a view of the batch's tensor."""
        # The view of a replay has it where there are groups.
        locs = getattr(batch, "group_cache_locs", None)
        return batch.out_cache_loc if locs is None else locs[self.index]
