"""Backends that fail one check each, in the plainest way, on the healthy minimal backend."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KernelPlan,
)
from attn_testkit.examples import MinimalBackend
from attn_testkit_corpus.faults.orders import in_other_order

ALL = MinimalBackend.capabilities
DECODE = ALL.with_changes(eager={"decode"}, graph={"decode"}, bounds={"max_q_rows": 1, "max_topk": 0})


class Healthy(MinimalBackend):
    capabilities = ALL.with_changes(kv_pool={"page_sizes": {16}})


class _Decode(MinimalBackend):
    capabilities = DECODE


class ConstructorRaises(_Decode):
    def __init__(self, context: BackendContext) -> None:
        raise FileNotFoundError("libkernels.so")


class ForwardExits(_Decode):
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        raise ValueError("no kernel for this shape")


class WrongShape(_Decode):
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        return super().run(q, kv, plan)[:-1]


class WrongDtype(_Decode):
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        return super().run(q, kv, plan).float()


class WrongDevice(_Decode):
    capabilities = DECODE.with_changes(graph=(), server={"eager_without_waits": False})

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        return super().run(q, kv, plan).cpu()


class ReturnsNone(_Decode):
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        return None  # type: ignore[return-value]


class ScalesQueryInPlace(_Decode):
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        out = super().run(q, kv, plan)
        q.mul_(0.5)
        return out


class AdvancesLengths(_Decode):
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        if layer.layer_id == 1:
            batch.seq_lens.add_(1)
        return out


class LeavesShortRowsUnwritten(_Decode):
    """Poison is what ``empty`` finds, so the row of a request with fewer than eight keys stays poison."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        right = super().run(q, kv, plan)
        out = torch.empty_like(right)
        return torch.where((plan.kv_lens >= 8)[:, None, None], right, out)


class ZeroTimesNan(_Decode):
    """Masks the weights and not the values."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        request, visible = self.visible(q, plan)
        k, v = (cache[plan.page_table.long()].flatten(1, 2)[request].float() for cache in kv)
        rows = q.view(len(q), plan.layer.tp_k_head_num, plan.layer.q_per_kv, -1).float()
        logits = torch.einsum("thgd,tshd->thgs", rows, k) * plan.layer.scaling
        p = logits.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("thgs,tshd->thgd", p, v).flatten(1, 2).to(q.dtype)


class FiniteMinusInfinity(_Decode):
    """flashinfer #4401: a sentinel that a valid logit can be below."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        request, visible = self.visible(q, plan)
        k, v = (cache[plan.page_table.long()].flatten(1, 2)[request].float() for cache in kv)
        rows = q.view(len(q), plan.layer.tp_k_head_num, plan.layer.q_per_kv, -1).float()
        logits = torch.einsum("thgd,tshd->thgs", rows, k) * plan.layer.scaling
        logits = logits.masked_fill(~visible[:, None, None], -5e4)
        top = logits.amax(-1, keepdim=True).clamp(min=-5e4)
        p = torch.exp(logits - top) * visible[:, None, None]
        p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
        v = v.masked_fill(~visible[:, :, None, None], 0.0)
        return torch.einsum("thgs,tshd->thgd", p, v).flatten(1, 2).to(q.dtype)


class WritesPaddingToTheLastSlot(_Decode):
    """vLLM #43810: slot -1 of a padded row is the pool's last slot."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        loc = torch.where(batch.out_cache_loc == 0, -1, batch.out_cache_loc)
        self.context.kv_pool.set_kv_buffer(layer, loc, k, v)
        return super().forward(q, k, v, layer, batch, save_kv_cache)


class SwapsKeyAndValueOfLayer1(_Decode):
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch)
        if layer.layer_id == 1:
            self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, v, k)
        return out


class ReadsHostLengths(_Decode):
    """Declares that it needs none."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.longest = int(batch.seq_lens_cpu.max())  # type: ignore[union-attr]


class WaitsForTheDeviceWhilePlanning(_Decode):
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.longest = int(batch.seq_lens.max().item())


class TunesForEveryLength(_Decode):
    capabilities = DECODE.with_changes(graph=(), needs={"cpu_seq_lens": True})

    def init_forward_metadata(self, batch):
        self.longest = int(batch.seq_lens_cpu.max())
        super().init_forward_metadata(batch)

    def run(self, q, kv, plan):
        # Not before there is an emulation: Triton decides at its import how it runs kernels.
        from attn_testkit_corpus.faults.tuned_copy import tuned_copy

        return tuned_copy(super().run(q, kv, plan), self.longest)


class AcceptsAnything(_Decode):
    def __init__(self, context: BackendContext) -> None:
        self.context = context
        pages = -(-context.max_context_len // context.page_size)
        self._page_starts = torch.arange(pages, device=context.device) * context.page_size
        self._kit_mask = None


class DeclaresWhatNoCaseCanMeet(MinimalBackend):
    capabilities = Capabilities(eager={"decode"}, heads=HeadShapes(families={"gqa"}, gqa_ratios={1}))


class SumsInAnyOrder(_Decode):
    """Bits that differ from run to run on every processor, well within rounding."""

    capabilities = DECODE.with_changes(promises={"deterministic": True})
    runs = 0

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        self.runs += plan.layer.layer_id == self.context.layers[0].layer_id
        return in_other_order(super().run(q, kv, plan), self.runs % 2 == 0)


class RoundsByBatchSize(_Decode):
    capabilities = DECODE.with_changes(promises={"batch_invariant": True})

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        return in_other_order(super().run(q, kv, plan), len(plan.kv_lens) > 1)


class RoundsDecodeDown(MinimalBackend):
    """Extend and decode differ by a rounding."""

    capabilities = ALL.with_changes(
        promises={"mode_invariant": True}, eager={"decode", "extend"}, graph=(), bounds={"max_topk": 0}
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        return in_other_order(super().run(q, kv, plan), plan.max_q_len > 1)


class RoundsReplaysOfDecode(MinimalBackend):
    """Decode has the bits of extend in eager mode, and those of another rounding in large buckets of its graph."""

    capabilities = ALL.with_changes(
        promises={"mode_invariant": True}, eager={"decode", "extend"}, graph={"decode"}, bounds={"max_topk": 0}
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        in_graph = plan.max_q_len == 1 and torch.cuda.is_current_stream_capturing()
        return in_other_order(super().run(q, kv, plan), in_graph and len(plan.kv_lens) > 2)


class StatisticsOverTheWholeBatch(_Decode):
    """vLLM #57094: one scale for all rows, padding included."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        out = super().run(q, kv, plan).float()
        scale = out.abs().amax()
        return (out / scale * scale).to(q.dtype)


class NoKeysGiveNaN(_Decode):
    """vLLM #57094: a padded request has no key, and its rows are 0 / 0."""

    capabilities = DECODE.with_changes(server={"finite_padding": True, "padded_requests": {"nothing"}})

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        keys = plan.kv_lens.to(q.dtype)[:, None, None]
        return super().run(q, kv, plan) * (keys / keys)


class WorkspaceAllocatedInCapture(_Decode):
    """Zeroed in the first graph that is captured, and read by the second (aiter #5393)."""

    bias: torch.Tensor | None = None

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        if self.bias is None and torch.cuda.is_current_stream_capturing():
            self.bias = torch.zeros(8, device=self.context.device)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        out = super().run(q, kv, plan)
        return out if self.bias is None else (out.float() + self.bias[0]).to(q.dtype)


class SharedLengthsOfAllBuckets(_Decode):
    """One buffer of lengths for all graphs, filled for the largest bucket only when that is replayed first."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.lens = torch.ones(max_bs, dtype=torch.int32, device=self.context.device)
        self.last_bs = 0

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        bs = batch.batch_size
        if in_capture or self.last_bs in (0, bs):
            self.lens[:bs].copy_(batch.seq_lens[:bs])
        self.last_bs = 0 if in_capture else bs

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self._kit_step = replace(self._kit_step, kv_lens=self.lens[: batch.batch_size])


class NotABackend:
    capabilities = DECODE


assert issubclass(Healthy, AttentionBackend)
assert ForwardMode.DECODE in DECODE.graph
