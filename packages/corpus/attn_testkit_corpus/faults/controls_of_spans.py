"""Healthy controls of bidirectional spans: the forms in which servers keep them."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode, Spans

from .catalogue import control
from .dense import Visibility
from .e_spans import CAUSAL, CopiedSpans, SpanBackend
from .i_wider_tables import TablesOfViews


@control()
class SpansAsRangesOfRequests(SpanBackend):
    """Ranges [requests, most ranges, 2] that the kernel compares with each row and key (vLLM's Triton kernel)."""


@control()
class SpansOfColumns(TablesOfViews):
    """Request tables and ranges that are columns of buffers which the server keeps for the longest request."""


@control()
class SpansCopiedByThePlan(CopiedSpans):
    """Ranges that every plan of a capture or a replay copies into memory of the backend."""


@control()
class SpansAsAMask(SpanBackend):
    """A mask of [rows, keys] per request, flat, made on the host for each eager step (``custom_mask`` of SGLang's Gemma
    3). Spans are within the rows of the step, and windows cut the mask.
    """

    capabilities = CAUSAL.with_changes(spans=Spans({ForwardMode.EXTEND}))

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.mask = _flat_masks(batch) if batch.mm_prefix_range and any(batch.mm_prefix_range) else None
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.mask = None

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key_position, seen = super().visibility(batch, counts, offset)
        if self.mask is None:
            return position, key_position, seen
        seen, first = seen.clone(), 0
        assert batch.extend_seq_lens_cpu is not None
        assert batch.extend_prefix_lens_cpu is not None
        for request, (new, prefix) in enumerate(
            zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True)
        ):
            size = new * (prefix + new)
            seen[request, :new, : prefix + new] = self.mask[first : first + size].view(new, -1)
            first += size
        return position, key_position, seen

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return self.narrowed(self.visible, layer)


def _flat_masks(batch: ForwardBatch) -> torch.Tensor:
    """Flat bool on the device, copied without a wait: [new, prefix + new] of each request, one after another."""
    assert batch.extend_seq_lens_cpu is not None
    assert batch.extend_prefix_lens_cpu is not None
    assert batch.mm_prefix_range is not None
    masks = []
    of_requests = zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, batch.mm_prefix_range, strict=True)
    for new, prefix, spans in of_requests:
        mask = torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix)
        for first, last in spans:
            mask[first - prefix : last + 1 - prefix, first : last + 1] = True
        masks.append(mask.flatten())
    return torch.cat(masks).pin_memory().to(batch.seq_lens.device, non_blocking=True)


@control()
class SpansAsARangeOfEachRow(SpanBackend):
    """A range [rows, 2] for each row, made on the host from positions, and (-1, -1) outside (FlashAttention 4 in vLLM
    and SGLang, FlashInfer). A replay copies it into memory that its graph reads.
    """

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.of_rows = torch.full((context.max_num_tokens, 2), -1, dtype=torch.int64, device=context.device)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if self.context.max_spans and batch.forward_mode is ForwardMode.EXTEND:
            found = _ranges_of_rows(batch)
            self.of_rows.fill_(-1)
            self.of_rows[: len(found)].copy_(found.pin_memory(), non_blocking=True)

    def of_spans(self) -> torch.Tensor:
        own = self.of_rows[self.row]
        first, last = own[..., :1], own[..., 1:]
        return (first <= self.key) & (self.key <= last) & (self.key < self.kv_lens[:, None, None])


def _ranges_of_rows(batch: ForwardBatch) -> torch.Tensor:
    """[T, 2] int64 on the host: first and last position of the span that a row is in, or -1."""
    assert batch.extend_seq_lens_cpu is not None
    assert batch.extend_prefix_lens_cpu is not None
    rows: list[tuple[int, int]] = []
    of_requests = zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, batch.mm_prefix_range or (), strict=True)
    for new, prefix, spans in of_requests:
        positions = range(prefix, prefix + new)
        rows += [next((span for span in spans if span[0] <= at <= span[1]), (-1, -1)) for at in positions]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
