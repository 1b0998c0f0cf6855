"""Class J: memory of outputs: given by the caller, or used again too early."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
_TILE = 16


class LentOutput(PlannedBackend):
    """Healthy parent: writes the output to the caller's memory."""

    capabilities = LEAN.with_changes(server={"takes_out": True})

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result = super().forward(q, k, v, layer, batch, save_kv_cache)
        return result if out is None else self.store(result, out, layer)

    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Tensor to return, for a result [T, Hq, Dv] and the caller's memory of the same shape."""
        return out.copy_(result)


@fault(
    slug="lent-output-is-ignored",
    source="general; output arguments of vLLM's layers",
    modes=_ALL,
    checks=("output-contract",),
    hint="takes_out",
)
class LentOutputIsIgnored(LentOutput):
    """The caller's memory is not written, and another tensor is returned."""

    @override
    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return result


@fault(
    slug="lent-output-of-the-first-call",
    source="general; output arguments that are bound once",
    modes=_ALL,
    checks=("steps-independent", "output-written", "captures-cleanly"),
    hint="takes_out",
)
class LentOutputOfTheFirstCall(LentOutput):
    """The memory of a layer's first call is kept, and later calls write there."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.first: dict[tuple[int, int], torch.Tensor] = {}

    @override
    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        self.first.setdefault((layer.layer_id, len(out)), out).copy_(result)
        return out


@fault(
    slug="lent-output-is-added-to",
    source="general; accumulating kernels whose output must be zero",
    modes=_ALL,
    checks=("finite", "output-written"),
    hint="takes_out",
)
class LentOutputIsAddedTo(LentOutput):
    """The kernel adds to the output, but the caller's memory holds anything."""

    @override
    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return out.add_(result)


@fault(
    slug="one-buffer-for-all-layers",
    source="general; outputs that are read after the next layer, as when partial results are merged",
    modes=_ALL,
    checks=("output-contract",),
    hint="output_lifetime",
)
class OneBufferForAllLayers(PlannedBackend):
    """Every layer returns the same memory, although outputs are declared valid until all layers have run."""

    capabilities = LEAN.with_changes(server={"output_lifetime": "model"})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        first = context.layers[0]
        heads, dim = first.tp_q_head_num, first.v_head_dim
        rows = context.max_num_tokens + 1
        self.out = torch.empty(rows, heads, dim, dtype=context.dtype, device=context.device)

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return self.buffer(layer, len(q)).copy_(super().attend(q, layer, meta))

    def buffer(self, layer: AttentionLayer, rows: int) -> torch.Tensor:
        """[rows, Hq, Dv]: memory of a layer's output."""
        return self.out[:rows]


@fault(
    slug="buffers-of-layers-overlap",
    source="general; a workspace that is cut by the rows of the smallest graph",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="",
)
class BuffersOfLayersOverlap(OneBufferForAllLayers):
    """The outputs of two layers lie a row apart, and a batch has more than one."""

    @override
    def buffer(self, layer: AttentionLayer, rows: int) -> torch.Tensor:
        return self.out[layer.layer_id :][:rows]


@fault(
    slug="whole-tile-written-to-lent-output",
    source="general; kernels whose last tile of rows is stored without a mask",
    modes=_ALL,
    checks=("inputs-unchanged",),
    hint="with a mask for the rest of a tile",
)
class WholeTileWrittenToLentOutput(LentOutput):
    """The last tile of rows is stored whole, past the caller's rows."""

    @override
    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        super().store(result, out, layer)
        rows = -(-len(out) // _TILE) * _TILE
        there = (out.untyped_storage().nbytes() // out.itemsize - out.storage_offset()) // out.stride(0)
        tail = min(rows, there) - len(out)
        out.as_strided((tail, *out.shape[1:]), out.stride(), out.storage_offset() + out.numel()).zero_()
        return out


@fault(
    slug="row-before-lent-output-is-written",
    source="general; an index of -1 for a request without rows",
    modes=(ForwardMode.DECODE, ForwardMode.EXTEND),
    checks=("inputs-unchanged",),
    hint="write only its own rows",
)
class RowBeforeLentOutputIsWritten(LentOutput):
    """The last row of the request before the first is written as well: row -1, which is the caller's."""

    @override
    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        super().store(result, out, layer)
        before = out.storage_offset() - out.stride(0)
        if before >= 0:
            out.as_strided((1, *out.shape[1:]), out.stride(), before).zero_()
        return out
