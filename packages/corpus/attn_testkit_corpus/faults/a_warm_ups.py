"""Class A: bugs that appear only in the warm-ups before a capture, because every replay is right."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .builds import CountedRunsBackend
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_DECODE, _VERIFY = (ForwardMode.DECODE,), (ForwardMode.TARGET_VERIFY,)


@fault(
    "vLLM #56734",
    "captures-cleanly",
    "outside page 0",
    modes="decode target-verify",
    executions="graph",
    slug="dummy-batch-writes-behind-page-0",
)
class DummyBatchWritesBehindPage0(PlannedBackend):
    """The plan for a capture gives dummy requests slots after page 0; only replays use the batch's slots."""

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        if self.capturing:
            views.slots.copy_(self.index[: len(views.slots)] + self.context.page_size)


@fault(
    "general (tuning at start)",
    "captures-cleanly",
    "store only at out_cache_loc",
    modes="decode target-verify",
    executions="graph",
    slug="warm-up-kernels-tuned-on-live-slots",
)
class WarmUpTunedOnLiveSlots(PlannedBackend):
    """The first plan for a capture times the cache writer on the last slots of the pool, and leaves them written."""

    tuned = False

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
    "flash-attention 1a58058a",
    "captures-cleanly",
    "only a plan resets",
    modes="decode target-verify",
    executions="graph",
)
class QueueHeadResetByPlansAlone(CountedRunsBackend):
    """Each forward continues after the work items of the last one, so the second forward of a plan finds none."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        if layer.layer_id == self.context.layers[-1].layer_id:
            self.runs.add_(1)
        return torch.where(self.runs > 1, torch.zeros_like(out), out)


@fault(
    "general (double-buffered semaphores)",
    "captures-cleanly",
    "warm-up 3",
    modes="decode target-verify",
    executions="graph",
)
class ThirdRunWrapsARingOfTwo(CountedRunsBackend):
    """Two sets of semaphores, cleared together by a plan: the third forward finds the first set used."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        if layer.layer_id == self.context.layers[-1].layer_id:
            self.runs.add_(1)
        return torch.where(self.runs > 2, torch.zeros_like(out), out)


@fault("sglang #27689", "no-host-lengths", "planning an eager step", modes="decode target-verify", executions="eager")
class EagerPlanWaits(PlannedBackend):
    """The longest length is fetched from the device, only in eager mode."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self.longest = int(batch.seq_lens.max())


@fault(
    "general (a loop over seq_lens.tolist())",
    "no-host-lengths",
    "an eager forward",
    modes="decode target-verify",
    executions="eager",
)
class EagerForwardWaits(PlannedBackend):
    """An eager forward loops over lengths that it fetches from the device."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        if not self.in_graph:
            self.longest = max(meta.kv_lens.tolist())
        return super().attend(q, layer, meta)
