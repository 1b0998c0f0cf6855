"""Class I: a different kernel for KV pools of more than 2^31 elements, whose last tile is not masked."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import PlannedBackend
from .pool_reads import read_slots

_MODES = (ForwardMode.DECODE, ForwardMode.EXTEND)
_ELEMENTS = 1 << 31


@fault(
    "general; a kernel for 64-bit offsets that multiplies keys after the last one by 0",
    "reads-own-kv finite",
    "NaN",
    modes="decode extend",
    slug="ragged-tile-of-the-64-bit-kernel",
    modelled="of the tile only the first slot after the last page is read",
)
class RaggedTileOfThe64BitKernel(PlannedBackend):
    """The last tile of a request in a large pool reaches past its last page, and the excess is multiplied by 0."""

    capabilities = LEAN.with_changes(eager=_MODES, graph=_MODES, bounds={"max_topk": 0}, windows=())

    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().gather(layer, slots)
        pool, page = self.context.kv_pool.get_value_buffer(layer.layer_id), self.context.page_size
        if pool.numel() < _ELEMENTS:
            return keys, values
        assert self.metadata is not None
        last = (self.metadata.kv_lens[:, None].long() - 1).clamp(min=0) // page
        behind = (self.metadata.page_table.long().gather(1, last) + 1) * page
        return keys, values + 0 * read_slots(pool, behind.clamp(max=len(pool) - 1))
