"""Class B: padded rows. Contents of the rows between the live batch and its bucket reach live rows."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode

from .builds import WorkListBackend
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_V1, _V2 = (ForwardMode.DRAFT_EXTEND,), (ForwardMode.DRAFT_EXTEND_V2,)
_UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)


@fault(
    "sglang #31270, #30378",
    "padding-inert",
    "bucket of exactly|padded rows",
    modes="draft-extend-v2",
    executions="graph",
    modelled="negative lengths shorten the work list; upstream they faulted",
)
class PadFillUnderflowsUniformWidth(WorkListBackend):
    """A padded request's length of 1, expanded to the uniform width, gives negative row lengths."""

    def total(self, meta: Metadata, position: torch.Tensor) -> torch.Tensor:
        return (position + 1).sum()


@fault(
    "ROCm/ATOM #2148",
    "padding-inert replay-follows-batch",
    "bucket of exactly|padded rows|only the graph is wrong|value from capture time",
    modes="decode",
    executions="graph",
    modelled="the last entry is the length of the work list; upstream the negative length faulted",
)
class PadIndptrTailRunsBackwards(WorkListBackend):
    """Only live entries of kv_indptr are refreshed: padded ones are from an earlier batch and decrease."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.indptr = torch.zeros(context.max_bs + 1, dtype=torch.int64, device=context.device)

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy_in(name, target, source)
        if name == "kv_lens":
            self.lens = source
        if name == "slots":
            live = len(source)
            self.indptr[1 : live + 1].copy_(self.lens[:live].cumsum(0))

    def total(self, meta: Metadata, position: torch.Tensor) -> torch.Tensor:
        return self.indptr[len(meta.kv_lens)] if self.in_graph else super().total(meta, position)


@fault(
    "sglang #24243; tokenspeed #618",
    "writes-own-kv",
    "slot of an earlier token|no live request|this step",
    modes="decode",
    executions="graph",
    modelled="row 1 is used instead of row 0, which is reserved here",
)
class PadReqRowAliasesLiveRequest(PlannedBackend):
    """Write slots are derived from request rows, and padding points at a row that a live request may own."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy_in(name, target, source)
        if name == "slots" and len(source) < len(target):
            target[len(source) :] = self.context.req_to_token[1, 0].long()


@fault(
    "vLLM #28579, #25265; xLLM #1939",
    "writes-own-kv padding-inert",
    "no live request|an earlier token|this step|padded rows",
    modes=_UNIFORM,
    executions="graph",
    slug="metadata-built-before-graph-padding",
)
class MetadataForLiveRowsOnly(PlannedBackend):
    """Metadata are built before the batch is padded, so they describe live rows and the graph runs the bucket."""

    names: tuple[str, ...] = ("page_table", "kv_lens", "cu_seqlens_q", "chunk", "slots")

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        self.live = -(-batch.out_cache_loc.shape[0] // views.max_q_len)
        super().fill(views, plan, batch)

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name not in self.names or self.capturing:
            return super().copy_in(name, target, source)
        count = len(source) if name == "slots" else self.live + (name == "cu_seqlens_q")
        target[:count].copy_(source[:count])
        return None


@fault(
    "sglang 0.5.23 (prefill_cuda_graph_runner)",
    "writes-own-kv",
    "no live request|an earlier token|this step",
    executions="graph",
    slug="prefill-slot-tail-stale",
    modelled="KV rows represent the state checkpoints of a hybrid model",
)
class SlotsTailStale(MetadataForLiveRowsOnly):
    """Slots past the live rows keep the previous replay's destinations, and padded rows are written there."""

    names = ("slots",)


@fault(
    "sglang 0.5.23 (flashattention_backend, skip-KV path)",
    "replay-follows-batch padding-inert",
    "only the graph is wrong|value from capture time|bucket of exactly",
    modes="draft-extend",
    executions="graph",
    modelled="the last real row gets its successor's result",
)
class QLongerThanCuSeqlens(PlannedBackend):
    """q has rows after the last query offset, and the kernel's last block overwrites the last real row."""

    def scatter(self, out: torch.Tensor, meta: Metadata, tokens: int) -> torch.Tensor:
        result, last = super().scatter(out, meta, tokens), meta.cu_seqlens_q[-1].long()
        row = self.index[:tokens]
        return result[torch.where((row == last - 1) & (last < tokens), row + 1, row).clamp(max=tokens - 1)]


@fault(
    "rtp-llm 6b88d7528",
    "replay-follows-batch",
    "rows are packed|KV tokens are missing|only the graph is wrong|value from capture time",
    modes="draft-extend",
    executions="graph",
)
class LeftAlignedPaddedQShiftsCausal(PlannedBackend):
    """Rows are left-aligned in slots of the full width, and the causal mask is aligned to the end of the slot."""

    def row_positions(self, meta: Metadata) -> torch.Tensor:
        if not self.in_graph:
            return super().row_positions(meta)
        return (meta.kv_lens - meta.max_q_len).long()[:, None] + self.index[: meta.max_q_len]


@fault("vLLM #57094, #57017", "padding-inert", "bucket of exactly|padded rows", modes="decode", executions="graph")
class PadRowNanSpreadsViaBatchScale(PlannedBackend):
    """A padded row of length 0 gives NaN, and the scale of the whole batch is taken from its largest value."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        empty = (lse == -torch.inf).all(1)[..., None]
        out = super().combine(acc, lse, layer).masked_fill(empty, torch.nan)
        # A power of two: dividing and multiplying by it changes no bit of a finite value.
        scale = torch.exp2(out.abs().amax().clamp(min=2.0**-20).log2().ceil())
        return out / scale * scale


@fault(
    "vLLM #51970",
    "completes",
    "ZeroDivisionError",
    modes="decode",
    executions="graph",
    slug="all-zero-lens-scheduler-oob",
    modelled="a division by zero on the host, where upstream a kernel read out of bounds",
)
class AllZeroLensScheduler(PlannedBackend):
    """Capture plans a batch whose lengths are all zero, which the scheduler was never written for."""

    capabilities = PlannedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0

    def plan(self, batch: ForwardBatch) -> Metadata:
        assert batch.seq_lens_cpu is not None
        lens = batch.seq_lens_cpu[: batch.batch_size].tolist()
        self.average = sum(lens) // sum(n > 0 for n in lens)
        return super().plan(batch)


@fault(
    "sglang KNOWN_FAILURES.md C.4",
    "replay-follows-batch",
    "KV tokens are right, but requests of|KV tokens are missing|only the graph is wrong|value from capture time",
    modes="draft-extend draft-extend-v2",
    executions="graph",
)
class PiecewiseCropDropsPrefix(PlannedBackend):
    """Keys are cropped to the number of query rows to drop padding, which drops the rest of the keys."""

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        seen = super().visible(meta, layer, position)
        if not self.in_graph:
            return seen
        return seen & (self.index[: seen.shape[-1]] < meta.cu_seqlens_q.diff()[:, None, None])


@fault(
    "general",
    "buckets-independent padding-inert",
    "only replays with padded rows|as the only replay",
    modes="decode",
    executions="graph",
)
class PaddingTakenForAPreemptedRequest(PlannedBackend):
    """A padded row whose position falls back to 0 counts as a preempted request, and the row before it is dropped with
    it."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.last = torch.zeros(context.max_num_tokens, dtype=torch.int64, device=context.device)
        """Positions of the replay before."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        assert self.metadata is not None
        padded = self.metadata.slots < self.context.page_size
        preempted = padded & (batch.positions < self.last[: len(q)]) & (batch.positions == 0)
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        return out.masked_fill((preempted.roll(-1) & ~padded)[:, None, None], 0.0)

    def finish(self, batch: ForwardBatch) -> None:
        if self.in_graph and batch.forward_mode.is_decode():
            self.last[: len(batch.positions)].copy_(batch.positions)


@fault(
    "vLLM #21691; FlashMLA of vLLM #3",
    "padding-inert",
    "bucket of exactly|padded rows",
    modes="decode",
    executions="graph",
    modelled="a surplus tile stores its result over that of request 0; upstream it read past a buffer as well",
)
class NoWorkTileMarkerEqualsBatch(PlannedBackend):
    """Tiles without work are marked with the number of live requests, which in a larger graph is a row of padding."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.marker = torch.zeros(1, dtype=torch.int64, device=context.device)

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        self.marker.fill_(batch.out_cache_loc.shape[0])

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if self.in_graph:
            # Padding has no place among the partial results, so what its tile stores is found at their beginning.
            marked, work = self.marker.clamp(max=len(acc) - 1), self.marker < len(acc)
            for part in (acc, lse):
                surplus = part[marked, 0]
                part[:1, 0].copy_(torch.where(work.view(1, *[1] * (surplus.dim() - 1)), surplus, part[:1, 0]))
        return super().combine(acc, lse, layer)


@fault(
    "vLLM #41841",
    "buckets-independent padding-inert",
    "no other mode|bucket of exactly",
    modes="decode",
    executions="graph",
    modelled="state by place in the batch; upstream it is that of requests, and the layers are Mamba's",
)
class StaleRequestStateFakesPrefill(PlannedBackend):
    """Prefilling requests are noted by row, except for padding, so an old note turns a batch of decodes into a mixed
    one."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.prefilling = [False] * (context.max_bs + 1)
        self.multi_mode = torch.zeros(1, dtype=torch.bool, device=context.device)

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        live = -(-batch.out_cache_loc.shape[0] // views.max_q_len)
        self.prefilling[:live] = [not batch.forward_mode.is_decode()] * live
        self.multi_mode.fill_(batch.forward_mode.is_decode() and any(self.prefilling[: batch.batch_size]))

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        # The other kernel of a mixed batch gets only the prefix, and here nothing adds the new rows.
        seen = super().visible(meta, layer, position)
        stored = self.index[: seen.shape[-1]] < (meta.kv_lens - meta.cu_seqlens_q.diff())[:, None, None]
        return seen & (stored | ~self.multi_mode) if self.in_graph else seen


@fault(
    "general (a row of padding that is stored somewhere harmless)",
    "completes replay-follows-batch padding-inert",
    "padded requests cause it",
    modes="decode",
    executions="graph",
)
class PaddedRowsStoreInRow0(PlannedBackend):
    """The program of a padded row, which has slot 0, stores its result in row 0 of the output."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        from .rows_in_turn import copied_by_slot

        return copied_by_slot(super().attend(q, layer, meta), meta.slots)
