"""Class J: work without order: relative to another stream, or to the host, which is ahead of the device."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch

from .catalogue import fault
from .parent import Metadata, PlannedBackend

_RACE = "only on emulated CUDA: on a GPU the numbers are wrong when the other stream is late, and seldom"


class PlansOnASideStream(PlannedBackend):
    """Healthy parent: plans on its own stream, and both streams wait for each other."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.side = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]

    def fork(self) -> None:
        """Order the plan after the caller's work."""
        self.side.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Order the caller's next work after the plan."""
        torch.cuda.current_stream().wait_stream(self.side)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.fork()
        with torch.cuda.stream(self.side):
            super().init_forward_metadata(batch)
        self.join()

    @override
    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        self.fork()
        with torch.cuda.stream(self.side):
            super().fill(views, plan, batch)
        self.join()


@fault("sglang #28034", "completes", "wrote on another stream", modelled=_RACE)
class PlanOnAStreamNobodyWaitsFor(PlansOnASideStream):
    """The plan runs on a side stream, and the forward or the replay begins without waiting for it."""

    def join(self) -> None:
        pass


@fault("sglang #28034", "completes", "on another stream", executions="graph", modelled=_RACE)
class PlanStreamWaitsForNothing(PlansOnASideStream):
    """The plan's last kernels run on a side stream that does not wait for the first, nor for the replay before."""

    def fork(self) -> None:
        pass


class StagesLengths(PlannedBackend):
    """Lengths come from the host, through pinned memory and an asynchronous copy: two buffers alternate, and each is
    filled again when its last copy is done.
    """

    capabilities = PlannedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.staging = [torch.zeros(context.max_bs, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self.copied: list[torch.cuda.Event | None] = [None, None]
        self.turn = 0

    def next_buffer(self) -> torch.Tensor:
        """Pinned memory that no pending copy reads."""
        self.turn = 1 - self.turn
        copied = self.copied[self.turn]
        if copied is not None:
            copied.synchronize()
        return self.staging[self.turn]

    @override
    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        assert batch.seq_lens_cpu is not None
        staged = self.next_buffer()[: batch.batch_size]
        staged.copy_(batch.seq_lens_cpu[: batch.batch_size])
        lens = staged.to(self.context.device, non_blocking=True)
        copied = self.copied[self.turn] = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        copied.record()
        return lens + counts if batch.forward_mode.is_target_verify() else lens


@fault(
    "TensorRT-LLM #15546; rtp-llm #1192",
    "completes finite matches-oracle reads-own-kv",
    "pinned source was written again|while the device is still busy",
    modelled="emulated CUDA compares what was copied with what is there later; on a GPU the numbers are wrong",
)
class StagingBufferFilledAgain(StagesLengths):
    """One pinned buffer, filled for the next step while the copy of this step's lengths may be pending."""

    def next_buffer(self) -> torch.Tensor:
        return self.staging[0]


class ReadsLengthsBack(PlannedBackend):
    """Healthy parent: lengths are copied to pinned memory, and the host waits for the copy before it reads them."""

    capabilities = PlannedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.on_host = torch.zeros(context.max_bs, dtype=torch.int64, pin_memory=True)

    def wait(self) -> None:
        """Wait until the copy is done."""
        torch.cuda.current_stream().synchronize()

    @override
    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        on_host = self.on_host[: batch.batch_size]
        on_host.copy_(batch.seq_lens[: batch.batch_size], non_blocking=True)
        self.wait()
        lens = torch.tensor(on_host.tolist(), dtype=torch.int32, device=self.context.device)
        return lens + counts if batch.forward_mode.is_target_verify() else lens


@fault(
    "flashinfer #564",
    "completes matches-oracle reads-own-kv finite",
    "the host has not waited for that copy|while the device is still busy",
    modelled="emulated CUDA refuses the read; on a GPU the numbers are those of an earlier step",
)
class LengthsReadBeforeTheirCopy(ReadsLengthsBack):
    """Lengths are copied to pinned memory, and read there while the copy may be pending."""

    def wait(self) -> None:
        pass


class TablesOfPlans(PlannedBackend):
    """Healthy parent: only plans read the request table, so the server's stream may rewrite it under a forward."""

    capabilities = PlannedBackend.capabilities.with_changes(
        heads={"families": {"gqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        server={"takes_rewritten_table": True},
    )

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        self.batch = batch
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@fault(
    "sglang #31270",
    "completes matches-oracle reads-own-kv finite",
    modes="decode extend target-verify",
    modelled="a request table, where upstream it was a mapping of slots; the kit's server writes it after the plan",
)
class TableReadUnderTheServersWrites(TablesOfPlans):
    """A graph and a forward look up pages in the request table, which the server's stream may already write."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return super().attend(q, layer, replace(meta, page_table=self.plan_pages(self.batch)))
