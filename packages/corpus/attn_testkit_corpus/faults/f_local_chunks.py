"""Class F: chunked-local layers, in which a row sees the keys of its own chunk of positions."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_MODES = (ForwardMode.DECODE, ForwardMode.EXTEND)


class ChunkedBackend(PlannedBackend):
    """Healthy parent: a row sees the keys of its chunk, by its own position."""

    capabilities = LEAN.with_changes(
        eager=_MODES, graph=_MODES, bounds={"max_topk": 0}, windows={"chunked": _MODES, "modes": ()}
    )

    @override
    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        seen, size = super().visible(meta, layer, position), layer.attention_chunk_size
        if not size:
            return seen
        return seen & self.in_chunk(self.index[: seen.shape[2]], position[..., None], size)

    def in_chunk(self, key: torch.Tensor, position: torch.Tensor, size: int) -> torch.Tensor:
        """[B, W, C] bool: True for keys [C] in the chunk of a row's position [B, W, 1]."""
        return key >= position // size * size


@fault(
    "general; layers with a size of chunks and a kernel that has windows",
    "matches-oracle reads-own-kv",
    modes="decode extend",
)
class ChunkTakenForAWindow(ChunkedBackend):
    """A row sees as many earlier keys as a chunk has, including keys of the previous chunk."""

    def in_chunk(self, key: torch.Tensor, position: torch.Tensor, size: int) -> torch.Tensor:
        return key > position - size


@fault(
    "general; batches cut into chunks by their lengths only (vLLM's virtual batches)",
    "matches-oracle reads-own-kv finite",
    modes="extend",
)
class ChunkOfTheLastRowForAll(ChunkedBackend):
    """All rows of a request see the chunk of its last row, so rows of the chunk before see no key."""

    def in_chunk(self, key: torch.Tensor, position: torch.Tensor, size: int) -> torch.Tensor:
        assert self.metadata is not None
        last = (self.metadata.kv_lens.long() - 1)[:, None, None]
        return super().in_chunk(key, last.expand_as(position), size)
