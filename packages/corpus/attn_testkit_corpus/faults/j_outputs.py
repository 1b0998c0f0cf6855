"""Class J: memory of outputs: given by the caller, or used again too early."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault, helper
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


@fault("general; output arguments of vLLM's layers", "output-contract", "takes_out", modes=_ALL)
class LentOutputIsIgnored(LentOutput):
    """The caller's memory is not written, and another tensor is returned."""

    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return result


@fault(
    "general; output arguments that are bound once",
    "steps-independent output-written captures-cleanly",
    "takes_out",
    modes=_ALL,
)
class LentOutputOfTheFirstCall(LentOutput):
    """The memory of a layer's first call is kept, and later calls write there."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.first: dict[tuple[int, int], torch.Tensor] = {}

    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        self.first.setdefault((layer.layer_id, len(out)), out).copy_(result)
        return out


@fault("general; accumulating kernels whose output must be zero", "finite output-written", "takes_out", modes=_ALL)
class LentOutputIsAddedTo(LentOutput):
    """The kernel adds to the output, although the caller's memory has undefined contents."""

    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return out.add_(result)


@fault(
    "general; outputs that are read after the next layer, as when partial results are merged",
    "output-contract",
    "output_lifetime",
    modes=_ALL,
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

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return self.buffer(layer, len(q)).copy_(super().attend(q, layer, meta))

    @helper
    def buffer(self, layer: AttentionLayer, rows: int) -> torch.Tensor:
        """[rows, Hq, Dv]: memory of a layer's output."""
        return self.out[:rows]


@fault("general; a workspace that is cut by the rows of the smallest graph", "matches-oracle", modes=_ALL)
class BuffersOfLayersOverlap(OneBufferForAllLayers):
    """The outputs of two layers are one row apart, but a batch has more rows."""

    def buffer(self, layer: AttentionLayer, rows: int) -> torch.Tensor:
        return self.out[layer.layer_id :][:rows]


@fault(
    "general; kernels whose last tile of rows is stored without a mask",
    "inputs-unchanged",
    "with a mask for the rest of a tile",
    modes=_ALL,
)
class WholeTileWrittenToLentOutput(LentOutput):
    """The last tile of rows is stored whole, past the caller's rows."""

    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        super().store(result, out, layer)
        rows = -(-len(out) // _TILE) * _TILE
        there = (out.untyped_storage().nbytes() // out.itemsize - out.storage_offset()) // out.stride(0)
        tail = min(rows, there) - len(out)
        out.as_strided((tail, *out.shape[1:]), out.stride(), out.storage_offset() + out.numel()).zero_()
        return out


@fault(
    "general; an index of -1 for a request without rows",
    "inputs-unchanged",
    "write only its own rows",
    modes="decode extend",
)
class RowBeforeLentOutputIsWritten(LentOutput):
    """The last row of the request before the first is written as well: row -1, which is the caller's."""

    def store(self, result: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        super().store(result, out, layer)
        before = out.storage_offset() - out.stride(0)
        if before >= 0:
            out.as_strided((1, *out.shape[1:]), out.stride(), before).zero_()
        return out
