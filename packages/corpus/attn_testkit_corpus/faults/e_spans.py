"""Class E: bidirectional spans, such as images: rows that see later rows of their own span."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode, Spans

from .catalogue import fault
from .dense import DenseBackend

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})
ALL_SPANS = Spans(_MODES, in_graphs=True, of_prefix=True, wider_than_window=True, by_layer=True)
CAUSAL = DenseBackend.capabilities.with_changes(
    eager=_MODES,
    graph=_MODES,
    heads={"families": {"gqa"}, "head_dims": {64}, "gqa_ratios": {4}},
    precision={"dtypes": {"bf16"}},
    kv_pool={"kv_dtypes": {"same"}},
    bounds={"max_q_rows": 1, "max_topk": 0, "max_context_len": 1 << 14},
    windows=_MODES,
)
"""Capabilities with few values in fields that do not matter for this file."""
_TILE = 16


class SpanBackend(DenseBackend):
    """Healthy parent: ranges of positions for each request, read at the start of the step (vLLM's Triton kernel)."""

    capabilities = CAUSAL.with_changes(spans=ALL_SPANS)

    spans: torch.Tensor
    """[B, R, 2] int64: first and last position of each span; (0, 0) for none."""

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.spans = self.ranges(batch)

    def ranges(self, batch: ForwardBatch) -> torch.Tensor:
        """[B, R, 2] int64: first and last position of each span."""
        found = getattr(batch, "mm_prefix_range_tensor", None)
        return torch.zeros(len(self.counts), 1, 2, dtype=torch.int64, device=self.key.device) if found is None else (
            found.long()
        )  # fmt: skip

    @override
    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        seen = self.visible | self.of_spans() if self.has_spans(layer) else self.visible
        return self.narrowed(seen, layer)

    def has_spans(self, layer: AttentionLayer) -> bool:
        """True if rows of spans see each other in the layer."""
        return layer.bidirectional_spans

    def narrowed(self, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, W, C] bool: ``seen``, likewise, inside the layer's window."""
        if layer.sliding_window_size < 0:
            return seen
        return seen & (self.key_position >= self.window_start(layer)[..., None])

    def of_spans(self) -> torch.Tensor:
        """[B, W, C] bool: row and key are in one span, and the key is one of the request."""
        rows, keys = self.row_in(self.position), self.key_in(self.key[None])
        return (rows[..., None] & keys[:, :, None]).any(1) & (self.key < self.kv_lens[:, None])[:, None]

    def row_in(self, position: torch.Tensor) -> torch.Tensor:
        """[B, R, W] bool: a row is in the span. ``position`` [B, W] int64."""
        return (self.spans[..., :1] <= position[:, None]) & (position[:, None] <= self.spans[..., 1:])

    def key_in(self, position: torch.Tensor) -> torch.Tensor:
        """[B, R, C] bool: a key is in the span. ``position`` [1 or B, C] int64."""
        return (self.spans[..., :1] <= position[:, None]) & (position[:, None] <= self.spans[..., 1:])


@fault(
    "sglang #39805, vllm-gaudi #1797; backends that take no mask of images",
    "matches-oracle",
    "rows of a span do not see its later rows",
    modes="extend",
)
class SpansThatNeverReachTheKernel(DenseBackend):
    """Spans are declared, but the kernel is causal: rows of an image see the image only up to themselves."""

    capabilities = SpanBackend.capabilities


@fault("vllm #47332", "matches-oracle", "window is not applied in a batch with spans", modes="extend")
class WindowLostWithAMaskOfSpans(SpanBackend):
    """The mask of spans replaces the window, so rows of such a batch see all keys before them."""

    def narrowed(self, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        any_span = self.spans.any()
        return torch.where(any_span, seen, super().narrowed(seen, layer)) if self.has_spans(layer) else (
            super().narrowed(seen, layer)
        )  # fmt: skip


@fault("vllm #47332", "matches-oracle", "number in the step", modes="extend")
class CausalByRowNumberWithAMaskOfSpans(SpanBackend):
    """A mask of spans compares keys with the row's number in its chunk, which is its position only without a prefix."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        if not self.has_spans(layer):
            return super().in_window(layer)
        number = torch.arange(self.position.shape[1], device=self.key.device)
        visible = (self.key <= number[:, None]) & (self.key < self.kv_lens[:, None, None])
        seen = torch.where(self.spans.any(), visible | self.of_spans(), self.visible)
        return self.narrowed(seen, layer)


@fault(
    "general; mm_req_doc_ranges by the order of requests (vLLM)",
    "matches-oracle",
    "spans of another request",
    modes="extend",
)
class SpansOfTheRequestBefore(SpanBackend):
    """Spans are listed by the order of admission, so each request has the spans of the one before."""

    def ranges(self, batch: ForwardBatch) -> torch.Tensor:
        return super().ranges(batch).roll(1, 0)


@fault(
    "general; offsets with their last token (sglang's gemma3_mm) read as half-open",
    "matches-oracle",
    "last position of a span",
    modes="extend",
)
class EndOfASpanExcluded(SpanBackend):
    """The last position of a span is read as its end, so the last row is outside."""

    def ranges(self, batch: ForwardBatch) -> torch.Tensor:
        found = super().ranges(batch)
        return torch.stack([found[..., 0], found[..., 1] - 1], -1)


@fault(
    "general; half-open offsets read with their end",
    "matches-oracle",
    "position after the last one of a span",
    modes="extend",
)
class EndOfASpanIncludedTwice(SpanBackend):
    """One is added to the last position of a span, so the row after it is inside."""

    def ranges(self, batch: ForwardBatch) -> torch.Tensor:
        found = super().ranges(batch)
        return torch.stack([found[..., 0], found[..., 1] + (found[..., 1] > found[..., 0])], -1)


@fault(
    "general; mask of the new rows indexed by im_begin - prefix (sglang's gemma3_mm)",
    "matches-oracle",
    "counted from the first row of the step",
    modes="extend",
)
class SpansCountedFromTheStep(SpanBackend):
    """Positions of spans count from the first row of the step, but the batch counts them from the first token."""

    def row_in(self, position: torch.Tensor) -> torch.Tensor:
        return super().row_in(position - (self.kv_lens - self.counts)[:, None])

    def key_in(self, position: torch.Tensor) -> torch.Tensor:
        return super().key_in(position - (self.kv_lens - self.counts)[:, None])


@fault(
    "general; runs of image tokens (vLLM-ascend's notes on DeepSeek V4.1)",
    "matches-oracle",
    "adjacent spans",
    modes="extend",
)
class AdjacentSpansAreOne(SpanBackend):
    """Spans are reconstructed as runs of image tokens, so rows of one image see an image that follows directly."""

    def of_spans(self) -> torch.Tensor:
        # [B, C]: the number of the run that a position belongs to, 0 outside.
        inside = self.key_in(self.key[None]).any(1)
        begins = inside & ~torch.nn.functional.pad(inside, (1, 0))[:, :-1]
        run = begins.cumsum(1) * inside
        of_row = run.gather(1, self.position.clamp(max=run.shape[1] - 1))
        same = (of_row[..., None] == run[:, None]) & (of_row > 0)[..., None]
        return same & (self.key < self.kv_lens[:, None])[:, None]


@fault("general; requests with one image", "matches-oracle", "first span of each request", modes="extend")
class FirstSpanOnly(SpanBackend):
    """The kernel reads one range per request, so the rows of a second image are causal."""

    def ranges(self, batch: ForwardBatch) -> torch.Tensor:
        return super().ranges(batch)[:, :1]


@fault("sglang #33033, vllm #47217", "matches-oracle", "bidirectional_spans of the layer", modes="extend")
class SpansInEveryLayer(SpanBackend):
    """Spans apply in all layers, also in causal ones (Gemma 4's full attention)."""

    def has_spans(self, layer: AttentionLayer) -> bool:
        return True


@fault(
    "vllm #50539; flex_attention.py keeps spans that are wider than the window, and does not narrow them",
    "matches-oracle",
    "window does not narrow spans",
    modes="extend",
)
class SpansExemptFromTheWindow(SpanBackend):
    """The window is applied before spans are added, so rows of a wide image see its keys before the window."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        seen = self.narrowed(self.visible, layer)
        return seen | self.of_spans() if self.has_spans(layer) else seen


@fault(
    "general; the loop over keys ends where a causal tile's does (max_seq_prefix_len of vLLM's Triton kernel)",
    "matches-oracle",
    "ends where it would for causal rows in tiles of 16",
    modes="extend",
    modelled="tiles of 16 rows",
)
class TilesEndAtTheirLastRow(SpanBackend):
    """The loop over keys ends at the last row of its tile, so rows of a longer span miss the keys after the tile."""

    def of_spans(self) -> torch.Tensor:
        number = torch.arange(self.position.shape[1], device=self.key.device)
        last = (self.kv_lens - self.counts)[:, None] + number // _TILE * _TILE + _TILE - 1
        return super().of_spans() & (self.key <= last[..., None])


@fault(
    "general; a range that is compared with keys and not with the row",
    "matches-oracle",
    "keys of a span are visible to rows outside",
    modes="decode extend",
)
class KeysOfSpansForEveryRow(SpanBackend):
    """A key of a span is visible to every row, so a decode sees images outside its window."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        seen = self.narrowed(self.visible, layer)
        if not self.has_spans(layer):
            return seen
        valid = self.spans[..., :1] < self.spans[..., 1:]
        keys = (self.key_in(self.key[None]) & valid).any(1) & (self.key < self.kv_lens[:, None])
        return seen | keys[:, None]


class CopiedSpans(SpanBackend):
    """Healthy: a plan copies spans into memory of the backend, and graphs read that."""

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        most = max(1, self.context.max_spans)
        self.copied = torch.zeros(max_bs, most, 2, dtype=torch.int64, device=self.key.device)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.in_graph = False
        self.init_forward_metadata_in_graph(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.in_graph = True
        if self.context.max_spans:
            self.copy(batch, in_capture)

    def copy(self, batch: ForwardBatch, in_capture: bool) -> None:
        """Copy the spans of a capture or a replay."""
        assert batch.mm_prefix_range_tensor is not None
        self.copied[: batch.batch_size] = batch.mm_prefix_range_tensor

    @override
    def ranges(self, batch: ForwardBatch) -> torch.Tensor:
        return self.copied[: batch.batch_size] if self.in_graph else super().ranges(batch)


@fault(
    "general; metadata that a capture sees, and a replay does not update (sglang #10707: no graph with a mask)",
    "replay-follows-batch",
    "where the graph is captured",
    modes="extend",
    executions="graph",
)
class SpansOfTheCapture(CopiedSpans):
    """Only a capture copies spans, and its batch has no spans, so replays are causal."""

    def copy(self, batch: ForwardBatch, in_capture: bool) -> None:
        if in_capture:
            super().copy(batch, in_capture)


@fault(
    "general; a batch without an image leaves the ranges of the one before",
    "buckets-independent",
    "not reset between replays",
    modes="extend",
    executions="graph",
)
class SpansOfTheReplayBefore(CopiedSpans):
    """Only requests with spans are copied, so a request without spans keeps those of the replay before."""

    def copy(self, batch: ForwardBatch, in_capture: bool) -> None:
        assert batch.mm_prefix_range_tensor is not None
        for request, spans in enumerate(batch.mm_prefix_range or ()):
            if spans:
                self.copied[request] = batch.mm_prefix_range_tensor[request]


@fault("general", "refuses-undeclared", "spans in one layer", modes="extend", executions="eager")
class SpansOfOneLayerAreAccepted(SpanBackend):
    """Spans are declared for all layers of a model, but the constructor accepts a model in which only one layer has
    them."""

    capabilities = SpanBackend.capabilities.with_changes(spans={"by_layer": False})

    def __init__(self, context: BackendContext) -> None:
        self.context, self.mask_buffer = context, None
        self.key = torch.arange(context.max_context_len, device=context.device)
