"""Healthy backends with unusual but correct behavior. The kit must find no fault with any of them; if it does, the kit
is wrong. Most declare only the modes in which their unusual behavior shows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    LegacyGraphHooks,
    TreeMaskMode,
    VerifyMask,
)

from .catalogue import control, helper
from .orders import in_other_order
from .parent import CountingBackend, Metadata, PlannedBackend

_WHOLE = PlannedBackend.capabilities
_LEAN = _WHOLE.with_changes(
    heads={"families": {"gqa", "mqa"}, "head_dims": {64}},
    precision={"dtypes": {"bf16"}},
    options={"logit_cap": False, "sinks": False},
)


def _in(*modes: str, **changes: Any) -> Any:
    """Capabilities with few values, for some modes, eager and graph."""
    trees = {} if "target-verify" in modes else {"bounds": {"max_topk": 0}}
    return _LEAN.with_changes(eager=modes, graph=modes, windows=modes, **trees).with_changes(**changes)


@control()
class PlanOutsideTheGraph(PlannedBackend):
    """The parent of the faults: plan, split KV, workspace, arbitrary table tails."""


@control()
class FillValueZero(PlannedBackend):
    """Padded requests have no key at all, as FlashInfer requires (sglang #1094)."""

    capabilities = _in("decode", "target-verify")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0


@control()
class PlanInsideTheGraph(PlannedBackend):
    """The plan is recorded, and rebuilt on the device by every replay."""

    capabilities = _in("draft-extend")

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        """Do nothing outside the graph."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        assert self.metadata is not None
        super().fill(self.metadata, self.plan(batch), batch)


@control()
class PageTailsZero(PlannedBackend):
    """Table entries past a request's pages are 0 (trtllm)."""

    capabilities = _in("target-verify")
    tail = 0

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        lens = super().plan_lengths(batch, counts)
        self.used = -(-lens // self.context.page_size)
        return lens

    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        past = self.index[: self.pages] >= self.used[:, None]
        return super().plan_pages(batch).masked_fill(past, self.tail)


@control()
class PageTailsMinusOne(PageTailsZero):
    """Table entries past a request's pages are -1 (FlashMLA), and never looked up."""

    capabilities = _in("decode")
    tail = -1

    def key_slots(self, meta: Metadata) -> torch.Tensor:
        return super().key_slots(meta).clamp(min=0)


@control()
class PageTailsOfEarlierBatches(PageTailsZero):
    """Only the pages in use are refreshed; the others keep old values."""

    capabilities = _in("draft-extend-v2")

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "page_table":
            return super().copy_in(name, target, source)
        target.copy_(torch.where(self.index[: self.pages] < self.used[:, None], source, target))
        return None


@control()
class IndicesInt64(PlannedBackend):
    """Lengths, offsets and page ids of 64 bits."""

    capabilities = _in("draft-extend")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        for name in ("page_table", "kv_lens", "cu_seqlens_q", "chunk"):
            setattr(self.buffers, name, getattr(self.buffers, name).long())


@control()
class CountersZeroAtFirstUse(CountingBackend):
    """The workspace has counters that must be zero once, and are left zero."""

    capabilities = _in("draft-extend-v2")


@control()
class WorkspaceAtFirstUse(PlannedBackend):
    """The workspace is made by the first forward, which is never a capture."""

    capabilities = _in("decode")

    def new_workspace(self, numbers: int) -> torch.Tensor:
        self.numbers = numbers
        return torch.empty(0, device=self.context.device)

    def partial_views(self, bs: int, width: int, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.workspace.numel():
            self.workspace = super().new_workspace(self.numbers)
        return super().partial_views(bs, width, layer)


@control()
class CpuLengthsNeeded(PlannedBackend):
    """The plan is made from host lengths and uploaded from pinned memory (FlashInfer)."""

    capabilities = _in("target-verify", "draft-extend", needs={"cpu_seq_lens": True})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        # Two, taken in turns: the copy of the step before may still be under way.
        self.pinned = [torch.zeros(context.max_bs, dtype=torch.int32, pin_memory=True) for _ in range(2)]

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        assert batch.seq_lens_cpu is not None
        bs = batch.batch_size
        self.pinned.reverse()
        drafts = self.context.num_draft_tokens if batch.forward_mode.is_target_verify() else 0
        self.pinned[0][:bs].copy_(batch.seq_lens_cpu[:bs] + drafts)
        return self.pinned[0][:bs].to(self.context.device, non_blocking=True)


@control()
class KernelByBatchSize(PlannedBackend):
    """Small batches are split over the keys, but large ones are not; batch invariance is not declared."""

    capabilities = _in("decode")

    def in_split(self, meta: Metadata) -> torch.Tensor:
        splits = super().in_split(meta)
        if len(meta.kv_lens) <= 2:
            return splits
        return torch.stack([splits.any(1), *[torch.zeros_like(splits[:, 0])] * (self.max_splits - 1)], 1)


@control()
class StridedV1BehindAScatter(PlannedBackend):
    """Packed rows are scattered to a uniform stride, and gathered again (trtllm)."""

    capabilities = _in("draft-extend")

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        bs, width = len(meta.kv_lens), meta.max_q_len
        strided = q[super().row_of(meta, len(q)).flatten()]
        uniform = Metadata(
            meta.page_table, meta.kv_lens, self.index[: bs + 1] * width, meta.chunk, meta.slots, None, width
        )
        self.counts = meta.cu_seqlens_q.diff()
        out = super().attend(strided, layer, uniform)
        return self.scatter(out.view(bs, width, *out.shape[1:]), meta, len(q))

    def row_positions(self, meta: Metadata) -> torch.Tensor:
        return (meta.kv_lens - self.counts).long()[:, None] + self.index[: meta.max_q_len]


@control()
class SplitsInAnyOrder(PlannedBackend):
    """Splits are summed as they finish, so bits vary, and determinism is not declared."""

    capabilities = _in("decode", promises={"deterministic": False})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.turn = torch.zeros((), dtype=torch.int64, device=context.device)

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        # Counted on the device: so does every replay.
        self.turn += layer.layer_id == self.context.layers[0].layer_id
        return in_other_order(super().attend(q, layer, meta), self.turn % 2 == 0)


@control()
class FinitePageTails(PlannedBackend):
    """Unused slots of the last page get a weight of 0, and are declared to need finite numbers."""

    capabilities = _in("target-verify", needs={"finite_page_tails": {"same", "fp8_e4m3"}})

    def mask_values(self, values: torch.Tensor, seen: torch.Tensor, meta: Metadata) -> torch.Tensor:
        page = self.context.page_size
        end = -(-meta.kv_lens // page) * page
        past = self.index[: values.shape[1]] >= end[:, None]
        return values.masked_fill(past[:, :, None, None], 0.0)


@control()
class OneOutputBuffer(PlannedBackend):
    """Every layer returns the same buffer, which the next layer overwrites."""

    capabilities = _in("draft-extend")

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        first = context.layers[0]
        self.out = torch.empty(
            context.max_num_tokens, first.tp_q_head_num, first.v_head_dim, dtype=context.dtype, device=context.device
        )

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return self.out[: len(q)].copy_(super().attend(q, layer, meta))


@control()
class FlatOutput(PlannedBackend):
    """The output is [T, Hq * Dv]."""

    capabilities = _in("decode")

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return super().attend(q, layer, meta).flatten(1)


@control()
class MetadataObjectsRebuilt(PlannedBackend):
    """A new metadata object for each step, around the same buffers."""

    capabilities = _in("target-verify")

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.graphs[self.key(batch)] = self.views(batch)
        super().init_forward_metadata_out_graph(batch, in_capture)


@control()
class FullMaskBuffer(PlannedBackend):
    """The backend gives the draft stage its own FULL_MASK buffer, filled in place."""

    capabilities = _in("target-verify")
    mask_buffer: VerifyMask | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        n = self.context.num_draft_tokens
        cells = max_bs * n * (self.context.max_context_len + n)
        buffer = torch.zeros(cells, dtype=torch.bool, device=self.context.device)
        self.mask_buffer = VerifyMask(buffer, TreeMaskMode.FULL_MASK, max_bs)

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self.mask_buffer


@control()
class OlderGraphHooks(LegacyGraphHooks, PlannedBackend):
    """The two hooks of servers up to mid-2026; K and V are stored by the batch's slots."""

    capabilities = _in("decode", "draft-extend")

    def init_forward_metadata_capture_cuda_graph(self, *args: Any) -> None:
        bs, _, rows, lens, _, mode, spec = args
        self.prepare(bs, rows, lens, mode, spec, True)

    def init_forward_metadata_replay_cuda_graph(self, *args: Any) -> None:
        bs, rows, lens, _, _, mode, spec, _ = args
        self.prepare(bs, rows, lens, mode, spec, False)

    @helper
    def prepare(
        self, bs: int, rows: torch.Tensor, lens: torch.Tensor, mode: ForwardMode, spec: Any, capture: bool
    ) -> None:
        """Call the newer hook with the older one's arguments."""
        batch = SimpleNamespace(
            batch_size=bs,
            req_pool_indices=rows,
            seq_lens=lens,
            forward_mode=mode,
            spec_info=spec,
            out_cache_loc=rows[:0],
        )
        PlannedBackend.init_forward_metadata_out_graph(self, cast(ForwardBatch, batch), capture)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if save_kv_cache:
            self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        return super().forward(q, k, v, layer, batch, save_kv_cache=False)


@control()
class NanInPaddedRows(PlannedBackend):
    """Output rows of padded requests hold NaN: nothing may read them."""

    capabilities = _in("decode", "draft-extend")

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        # A batch of only padding belongs to a capture, and servers want its warm-up finite.
        live = meta.slots >= self.context.page_size
        padded = ~live & live.any()
        return super().attend(q, layer, meta).masked_fill(padded[:, None, None], torch.nan)


@control()
class ForkedStream(PlannedBackend):
    """The store runs on its own stream, which forks and joins inside the capture."""

    capabilities = _in("draft-extend-v2")

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.side = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            super().write_kv(layer, k, v, meta)
        torch.cuda.current_stream().wait_stream(self.side)
