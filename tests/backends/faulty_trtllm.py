"""Mistakes that real adapters of TensorRT-LLM kernels have made, each put back into a copy of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_testkit.backends.tokenspeed_mla import TokenspeedMLABackend
from attn_testkit.backends.trtllm_mha import TRTLLMMHABackend, XQABackend
from attn_testkit.backends.trtllm_mla import Metadata, TRTLLMMLABackend
from attn_testkit.backends.trtllm_mla_sparse import TRTLLMMLASparseBackend
from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch


class LengthsOfThePrefix(TRTLLMMHABackend):
    """Draft-extend v2 with lengths that do not count the new rows: each row misses the last N keys."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        if batch.forward_mode.is_draft_extend_v2():
            self._metadata.cache_seqlens.sub_(self._metadata.width)


class PagesOfTheFirstBranch(TRTLLMMHABackend):
    """All branches of a draft read the page list of the first, as if no page had been copied for them."""

    def _fill_branches(self, metadata: Any, batch: ForwardBatch, spec: Any) -> None:
        super()._fill_branches(metadata, batch, spec)
        first = metadata.page_table[:: spec.topk].clone()
        metadata.page_table.copy_(first.repeat_interleave(spec.topk, 0))


class LengthsOfTheFirstForward(TRTLLMMLABackend):
    """All forwards of a draft have the lengths of the first."""

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, **more: Any) -> torch.Tensor:
        spec = batch.spec_info
        if batch.forward_mode.is_draft_decode():
            batch = replace(batch, spec_info=replace(spec, step=0))  # type: ignore[type-var]
        return super().forward(q, k, v, layer, batch, **more)


class DraftsNotCounted(TRTLLMMHABackend):
    """Verify with the prefix alone, as ``seq_lens`` has it."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        if batch.forward_mode.is_target_verify():
            self._metadata.cache_seqlens.sub_(self._metadata.width)


class QueriesOf16Bits(TRTLLMMHABackend):
    """Queries stay as they are beside an FP8 pool. Decode has kernels for that, and context has none."""

    def _query(self, q: torch.Tensor, layer: AttentionLayer, fp8: bool) -> torch.Tensor:
        return super()._query(q, layer, fp8=False)


class OffsetsOfTheCapture(TRTLLMMHABackend):
    """Query offsets seeded once a bucket with the uniform stride, while v1 packs its rows (sglang #26019)."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        if batch.forward_mode.is_draft_extend() and batch.extend_seq_lens is None:
            offsets = self._metadata.cu_seqlens_q
            offsets.copy_(torch.arange(len(offsets), device=offsets.device) * self._metadata.width)


class StrideOfMinusOne(TRTLLMMHABackend):
    """Takes the width from the batch, where a capture leaves it unset (sglang #31367)."""

    def _width(self, batch: ForwardBatch) -> int:
        width = batch.spec_info.num_tokens_per_req if batch.forward_mode.is_target_verify() else super()._width(batch)
        return int(width)


class LongestOfTheCapture(TRTLLMMHABackend):
    """Gives the kernel the longest length of the capture's batch, and the graph keeps it (vLLM #42444)."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            kernel, longest = TRTLLMMHABackend(self.context)._decode, int(batch.seq_lens.max()) + self._metadata.width
            self._decode = lambda **given: kernel(**{**given, "max_seq_len": longest})


class ReadsHostLengths(TRTLLMMHABackend):
    """Reads the CPU mirror although it says that it needs none (sglang #26824)."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._longest = int(batch.seq_lens_cpu.max())
        super().init_forward_metadata(batch)


class WaitsForLengths(TRTLLMMHABackend):
    """Asks the device for the longest length before each replay."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self._longest = int(batch.seq_lens[: batch.batch_size].max().item())
        super().init_forward_metadata_out_graph(batch, in_capture)


class ValueScaleForgotten(TRTLLMMHABackend):
    """``bmm2_scale`` left at 1 (sglang before 0.5.14)."""

    def _step(self, common: dict[str, Any], *rest: Any) -> torch.Tensor:
        return super()._step({**common, "bmm2_scale": 1.0}, *rest)


class WindowOfW(TRTLLMMHABackend):
    """Takes ``window_left`` for the number of keys; it is inclusive, and the row itself is one more."""

    def _step(self, common: dict[str, Any], *rest: Any) -> torch.Tensor:
        return super()._step({**common, "window_left": max(-1, common["window_left"] - 1)}, *rest)


class MaskNotPassed(XQABackend):
    """Written for trtllm-gen, which needs no mask (sglang #32269)."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._causal_mask = None


class MaskRowsAreBytes(XQABackend):
    """Packs the rows of the mask without rounding them up to 32 bits."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if self._causal_mask is not None:
            self._causal_mask = self._causal_mask[..., :1].contiguous()


class WorkspaceNotZeroed(XQABackend):
    """Semaphores that are not zero at the first launch (flashinfer #1444)."""

    def _make_workspace(self) -> None:
        super()._make_workspace()
        self._workspace = torch.empty_like(self._workspace)


class TableWiderThanItsRows(XQABackend):
    """A slice of a wider table: the kernel takes the row length from the slice and the rows as packed."""

    def _new_metadata(self, bs: int) -> Any:
        metadata = super()._new_metadata(bs)
        wider = torch.empty(bs, self._pages + 3, dtype=torch.int32, device=self.context.device)
        return replace(metadata, page_table=wider[:, : self._pages])


class StridedQueries(XQABackend):
    """Queries as they come, a view of packed q, k and v; the kernel is given an address and no strides."""

    def _query(self, q: torch.Tensor, layer: AttentionLayer, fp8: bool) -> torch.Tensor:
        return q


class PackedRowsAtReplay(TRTLLMMLABackend):
    """v1's packed rows read at the uniform stride of the capture (sglang #21987)."""

    def _pad(self, q: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        rows = metadata.counts.shape[0] * metadata.width
        return q if q.shape[0] == rows else super()._pad(q, metadata)

    def _unpad(self, out: torch.Tensor, rows: int, metadata: Metadata) -> torch.Tensor:
        return out if rows == out.shape[0] else super()._unpad(out, rows, metadata)


class ViewIfDivisible(TRTLLMMLABackend):
    """Views ragged rows as [bs, total / bs] whenever that is possible, as with (1, 3)."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: ForwardBatch, *rest: Any, **kw: Any) -> torch.Tensor:
        metadata, rows, bs = self._metadata, q.shape[0], batch.batch_size
        if not batch.forward_mode.is_draft_extend() or rows % bs:
            return super().forward(q, k, v, layer, batch, *rest, **kw)
        self._metadata = replace(metadata, width=rows // bs)
        self._pad, self._unpad = (lambda q, _: q), (lambda out, *_: out)
        try:
            return super().forward(q, k, v, layer, batch, *rest, **kw)
        finally:
            del self._pad, self._unpad
            self._metadata = metadata


class RowsInFront(TRTLLMMLABackend):
    """v1's rows at the front of their block and lengths longer by what is missing: unowned slots, times zero."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        metadata = self._metadata
        if batch.forward_mode.is_draft_extend():
            metadata.seq_lens.add_(metadata.width - metadata.counts)
            requests = batch.req_pool_indices[: batch.batch_size].long()
            slots = self.context.req_to_token[requests[:, None], self._page_starts]
            self._fill_block_tables(metadata.block_tables, slots, metadata.seq_lens)

    def _pad(self, q: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        starts, place = metadata.ends - metadata.counts, torch.arange(metadata.width, device=q.device)
        return q[(starts[:, None] + place).clamp(0, q.shape[0] - 1)]

    def _unpad(self, out: torch.Tensor, rows: int, metadata: Metadata) -> torch.Tensor:
        row = torch.arange(rows, device=out.device, dtype=torch.int32)
        request = torch.searchsorted(metadata.ends, row, right=True).clamp(max=metadata.ends.shape[0] - 1)
        at = request * metadata.width + row - (metadata.ends - metadata.counts)[request]
        return out[at.clamp(0, out.shape[0] - 1)]


class MLADraftsNotCounted(TRTLLMMLABackend):
    """Verify with the prefix alone."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        if batch.forward_mode.is_target_verify():
            self._metadata.seq_lens.sub_(self._metadata.width)


class TableOfThePrefix(TRTLLMMLABackend):
    """Counts pages before the draft tokens: a draft that begins a page has none."""

    def _fill_block_tables(self, tables: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> None:
        super()._fill_block_tables(tables, slots, (lens - self._metadata.width).clamp(min=1))


class MetadataOfTheCapture(TRTLLMMLABackend):
    """Makes metadata outside the graph, and nothing before a replay."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        if self._static is None:
            super().init_forward_metadata_in_graph(batch)


class CountersAllocatedInCapture(TRTLLMMLABackend):
    """Allocates the kernel's counters with the first graph: only that graph ever sets them to zero."""

    def _attend(self, *given: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and not hasattr(self, "_born"):
            self._first, size = self._counters, self._counters.shape
            self._born = self._counters = torch.zeros(size, dtype=torch.uint8, device=self.context.device)
        return super()._attend(*given)


class LatentScaleForgotten(TRTLLMMLABackend):
    """The latent row is key and value: its scale belongs to both products."""

    def _attend(self, *given: Any) -> torch.Tensor:
        *others, layer = given
        return super()._attend(*others, replace(layer, k_scale=1.0)) * layer.k_scale


class WorkspaceMadeInForward(TokenspeedMLABackend):
    """Allocates its workspace when a batch first needs that much: in a capture, and in the next again (#25489)."""

    def _make_workspace(self) -> None:
        self._workspace = torch.empty(0, dtype=torch.int8, device=self.context.device)

    def _attend(self, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        partials = self.context.max_context_len // 128 + 1
        need = q.shape[0] * q.shape[1] * q.shape[2] * 513 * 4 * partials
        if self._workspace.numel() < need:
            self._workspace = torch.empty(need, dtype=torch.int8, device=q.device)
        return super()._attend(q, *rest)


class OutputScaleForgotten(TokenspeedMLABackend):
    """``output_scale`` left at 1."""

    def _attend(self, *inputs: Any) -> torch.Tensor:
        kernel = self._kernel
        self._kernel = lambda **given: kernel(**{**given, "output_scale": 1.0})
        try:
            return super()._attend(*inputs)
        finally:
            self._kernel = kernel


class QueriesNotRounded(TokenspeedMLABackend):
    """Gives the kernel queries in the model's dtype."""

    def _attend(self, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super()._attend(q.to(torch.bfloat16), *rest)


class SelectionOfTheCapture(TRTLLMMLASparseBackend):
    """Replays attend to the slots that were selected while the graph was captured."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, *given: Any, selected: torch.Tensor, **more: Any) -> torch.Tensor:
        kept = self._kept.setdefault((given[3].layer_id, len(selected)), selected.clone())
        if not torch.cuda.is_current_stream_capturing():
            kept.copy_(selected)
        return super().forward(*given, selected=kept, **more)


class LengthsOfTopK(TRTLLMMLASparseBackend):
    """Every row has ``topk`` keys, also one that selects fewer: the kernel reads -1 as a slot."""

    def _attend_pool(self, rows: Any, block_tables: Any, seq_lens: torch.Tensor, layer: Any) -> torch.Tensor:
        return super()._attend_pool(rows, block_tables, torch.full_like(seq_lens, layer.topk), layer)


class CountersOfTheRequests(TRTLLMMLASparseBackend):
    """Counters for the requests of the server, while each row is a request of the kernel."""

    def _make_workspace(self) -> None:
        TRTLLMMLABackend._make_workspace(self)
