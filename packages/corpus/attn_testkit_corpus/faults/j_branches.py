"""Class J: work of one forward on two streams, which are branches in a capture."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch

from .catalogue import fault
from .parent import Metadata, PlannedBackend

_FEW = PlannedBackend.capabilities.with_changes(
    heads={"families": {"gqa"}, "head_dims": {64}}, precision={"dtypes": {"bf16"}}
)
_RACE = "only on emulated CUDA: on a GPU the numbers are wrong when the other stream is late, and seldom"


class StoresOnASideStream(PlannedBackend):
    """Healthy parent: copies of new keys are stored on another stream, while this one computes positions and masks.
    The stream waits for the store before it gathers."""

    capabilities = _FEW

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.side = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]

    def lend(self, tensor: torch.Tensor) -> None:
        """Keep memory of this stream from being reused before the other stream has read it."""
        tensor.record_stream(self.side)

    def join(self) -> None:
        """Order what follows after the store."""
        torch.cuda.current_stream().wait_stream(self.side)

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        keys, values = k.clone(), v.clone()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            super().write_kv(layer, keys, values, meta)
        self.lend(keys)
        self.lend(values)

    @override
    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.join()
        return super().gather(layer, slots)


@fault("sglang #18746, #20611", "completes", "on another stream", modes="decode target-verify", modelled=_RACE)
class KeysGatheredBesideTheirStore(StoresOnASideStream):
    """Keys are gathered by slots while another stream stores the new ones; both are joined after the last layer."""

    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return PlannedBackend.gather(self, layer, slots)

    def finish(self, batch: ForwardBatch) -> None:
        self.join()


@fault(
    "general (record_stream is missing); vLLM #29288",
    "completes",
    "record_stream",
    modes="decode extend",
    executions="eager",
    modelled=_RACE,
)
class MemoryLentToAStreamAndFreed(StoresOnASideStream):
    """Copies of the keys are freed while another stream reads them, and the next copy reuses their memory."""

    def lend(self, tensor: torch.Tensor) -> None:
        pass

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        self.scratch = torch.zeros(k.shape, dtype=k.dtype, device=k.device)


class PlansByTwoGraphs(PlannedBackend):
    """Healthy parent: the plan of a replay ends in two graphs with separate pools, on two streams: one clamps page ids,
    one the sizes of splits. The replay waits for both."""

    capabilities = _FEW

    def pools(self) -> tuple[Any, Any]:
        """Memory pools of the two graphs."""
        return torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        whole, device = self.buffers, self.context.device
        self.staged = {"page_table": torch.zeros_like(whole.page_table), "chunk": torch.zeros_like(whole.chunk)}
        self.sides = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self.recorded = [torch.cuda.CUDAGraph() for _ in range(2)]
        with torch.cuda.graph(self.recorded[0], pool=self.pools()[0]):  # type: ignore[no-untyped-call, unused-ignore]
            whole.page_table.copy_(self.staged["page_table"].clamp(min=0))
        with torch.cuda.graph(self.recorded[1], pool=self.pools()[1]):  # type: ignore[no-untyped-call, unused-ignore]
            whole.chunk.copy_(self.staged["chunk"].clamp(min=self.tile))

    @override
    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy_in(name, self.staged[name][: len(target)] if name in self.staged else target, source)

    @override
    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        current = torch.cuda.current_stream()
        for side, graph in zip(self.sides, self.recorded, strict=True):
            self.fork(side)
            with torch.cuda.stream(side):
                graph.replay()
        for side in self.sides:
            current.wait_stream(side)

    def fork(self, side: torch.cuda.Stream) -> None:
        """Order the next graph, on ``side``, after the values that it reads."""
        side.wait_stream(torch.cuda.current_stream())


@fault(
    "general (torch: graphs that share a pool may not run at once)",
    "completes matches-oracle finite",
    "shares its memory pool",
    modes="decode target-verify",
    executions="graph",
    modelled="emulated CUDA names the race; on an H100 numbers are wrong, or kernels crash",
)
class TwoGraphsOfOnePoolAtOnce(PlansByTwoGraphs):
    """Two graphs of a plan share a memory pool, so that one's scratch memory is the other's, and run on two streams."""

    def pools(self) -> tuple[Any, Any]:
        self.pool = getattr(self, "pool", None) or torch.cuda.graph_pool_handle()
        return self.pool, self.pool
