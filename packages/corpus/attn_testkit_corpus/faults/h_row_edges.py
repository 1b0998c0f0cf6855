"""Class H: splits and tiles that one row of a request determines for all its rows; and full caches."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardMode

from .catalogue import fault
from .j_kept_between_steps import SplitTableEvictedUnderAGraph
from .parent import Metadata, PlannedBackend

_SEVERAL_ROWS = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.EXTEND)


@fault("general", "keys-counted-once matches-oracle", "left out|missing", modes=_SEVERAL_ROWS)
class SplitsOfTheFirstRow(PlannedBackend):
    """The number of splits of 256 keys is computed for a request's first row, but later rows need one more."""

    split = 256

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        first = (meta.kv_lens - meta.cu_seqlens_q.diff() + 1).long()
        end = (first + self.split - 1) // self.split * self.split
        key = self.index[: self.pages * self.context.page_size]
        return super().visible(meta, layer, position) & (key < end[:, None])[:, None]


@fault(
    "general; vLLM's unified attention takes BLOCK_Q = BLOCK_M // group for it",
    "matches-oracle",
    "head",
    modes=_SEVERAL_ROWS,
)
class TilesOfRowsBeginAtARow(PlannedBackend):
    """Rows x heads of a KV head are packed in tiles of 128, and a tile is assumed to begin with a row's first head."""

    tile_of_rows = 128

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        # The mask of each packed row is that of (start of its tile) // group + (place in the tile) // group.
        found = super().logits(rows, keys, layer)
        width, group = found.shape[1], layer.q_per_kv
        packed = torch.arange(width * group, device=found.device)
        start = packed // self.tile_of_rows * self.tile_of_rows
        taken = (start // group + (packed - start) // group).view(width, group)
        row = torch.arange(width, device=found.device)[:, None]
        # If that is the row before, the last key that the row may see is masked.
        meta = self.metadata
        assert meta is not None
        last = self.row_positions(meta)
        key = torch.arange(found.shape[-1], device=found.device)
        is_last = key == last[:, :, None]
        hidden = is_last[:, :, None, None] & (taken < row)[None, :, None, :, None]
        return found.masked_fill(hidden, -torch.inf)


@fault(
    "ROCm/aiter #4587", "addresses-stable buckets-independent", "allocate it once", modes="decode", executions="graph"
)
class SplitTableOfAFullCache(SplitTableEvictedUnderAGraph):
    """The table that a captured graph reads is owned by a cache of 128 entries, as upstream."""

    most = 128
