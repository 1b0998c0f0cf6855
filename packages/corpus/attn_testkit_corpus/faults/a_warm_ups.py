"""Class A: bugs that only the warm-ups before a capture show, because every replay is right."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .builds import CountedRunsBackend
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_GRAPH = ("graph",)
_DECODE, _VERIFY = (ForwardMode.DECODE,), (ForwardMode.TARGET_VERIFY,)
_DECODING = _DECODE + _VERIFY


@fault(
    slug="dummy-batch-writes-behind-page-0",
    source="vLLM #56734",
    modes=_DECODING,
    executions=_GRAPH,
    checks=("captures-cleanly",),
    hint="outside page 0",
)
class DummyBatchWritesBehindPage0(PlannedBackend):
    """The plan for a capture gives dummy requests slots after page 0; only replays use the batch's slots."""

    @override
    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        if self.capturing:
            views.slots.copy_(self.index[: len(views.slots)] + self.context.page_size)


@fault(
    slug="warm-up-kernels-tuned-on-live-slots",
    source="general (tuning at start)",
    modes=_DECODING,
    executions=_GRAPH,
    checks=("captures-cleanly",),
    hint="store only at out_cache_loc",
)
class WarmUpTunedOnLiveSlots(PlannedBackend):
    """The first plan for a capture times the cache writer on the last slots of the pool, and leaves them written."""

    tuned = False

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if self.tuned:
            return
        self.tuned = True
        layer, pool = self.context.layers[0], self.context.kv_pool
        slots = torch.arange(pool.num_slots - 4, pool.num_slots, device=self.context.device)
        k = torch.zeros(4, layer.tp_k_head_num, layer.head_dim, dtype=self.context.dtype, device=self.context.device)
        v = torch.zeros(4, layer.tp_v_head_num, layer.v_head_dim, dtype=self.context.dtype, device=self.context.device)
        pool.set_kv_buffer(layer, slots, k, v)


@fault(
    slug="queue-head-reset-by-plans-alone",
    source="flash-attention 1a58058a",
    modes=_DECODING,
    executions=_GRAPH,
    checks=("captures-cleanly",),
    hint="only a plan resets",
)
class QueueHeadResetByPlansAlone(CountedRunsBackend):
    """Each forward takes the work items after those of the last one: the second forward of a plan finds none."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        if layer.layer_id == self.context.layers[-1].layer_id:
            self.runs.add_(1)
        return torch.where(self.runs > 1, torch.zeros_like(out), out)


@fault(
    slug="third-run-wraps-a-ring-of-two",
    source="general (double-buffered semaphores)",
    modes=_DECODING,
    executions=_GRAPH,
    checks=("captures-cleanly",),
    hint="warm-up 3",
)
class ThirdRunWrapsARingOfTwo(CountedRunsBackend):
    """Two sets of semaphores, cleared together by a plan: the third forward finds the first set used."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        if layer.layer_id == self.context.layers[-1].layer_id:
            self.runs.add_(1)
        return torch.where(self.runs > 2, torch.zeros_like(out), out)


@fault(
    slug="eager-plan-waits",
    source="sglang #27689",
    modes=_DECODING,
    executions=("eager",),
    checks=("no-host-lengths",),
    hint="planning an eager step",
)
class EagerPlanWaits(PlannedBackend):
    """The longest length is fetched from the device, only in eager mode."""

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self.longest = int(batch.seq_lens.max())


@fault(
    slug="eager-forward-waits",
    source="general (a loop over seq_lens.tolist())",
    modes=_DECODING,
    executions=("eager",),
    checks=("no-host-lengths",),
    hint="an eager forward",
)
class EagerForwardWaits(PlannedBackend):
    """An eager forward loops over lengths that it fetches from the device."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        if not self.in_graph:
            self.longest = max(meta.kv_lens.tolist())
        return super().attend(q, layer, meta)
