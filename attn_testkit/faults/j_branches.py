"""Class J: work of one forward on two streams, which are branches in a capture."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_FEW = PlannedBackend.capabilities.with_changes(families={"gqa"}, dtypes={"bf16"}, head_dims={64})
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


@fault(
    slug="keys-gathered-beside-their-store",
    source="sglang #18746, #20611",
    modes=(ForwardMode.DECODE, ForwardMode.TARGET_VERIFY),
    checks=("completes",),
    hint="on another stream",
    modelled=_RACE,
)
class KeysGatheredBesideTheirStore(StoresOnASideStream):
    """Keys are gathered by slots while another stream stores the new ones; both are joined after the last layer."""

    @override
    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return PlannedBackend.gather(self, layer, slots)

    @override
    def finish(self, batch: ForwardBatch) -> None:
        self.join()


@fault(
    slug="memory-lent-to-a-stream-and-freed",
    source="general (record_stream is missing); vLLM #29288",
    modes=(ForwardMode.DECODE, ForwardMode.EXTEND),
    executions=("eager",),
    checks=("completes",),
    hint="record_stream",
    modelled=_RACE,
)
class MemoryLentToAStreamAndFreed(StoresOnASideStream):
    """Copies of the keys are dropped while another stream reads them, and the next copy gets their memory."""

    @override
    def lend(self, tensor: torch.Tensor) -> None:
        pass

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        self.scratch = torch.zeros(k.shape, dtype=k.dtype, device=k.device)
