"""Class J: what the instances for two batches of a step share. They have one pool, and are planned before they run."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, KVPool

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ONE_BATCH_OF_TWO = "without two-batch overlap"


class TwoBatchBackend(PlannedBackend):
    """Healthy parent: an instance shares nothing with others."""

    capabilities = LEAN.with_changes(
        eager={"decode", "extend", "target-verify"},
        graph={"decode", "target-verify"},
        server={"two_batch_overlap": True},
    )


_PLANS: WeakKeyDictionary[KVPool, tuple[PlannedBackend, Metadata]] = WeakKeyDictionary()


@fault("vLLM #48659", "matches-oracle finite reads-own-kv", _ONE_BATCH_OF_TWO, modes="decode target-verify")
class PlanOfTheOtherBatchIsUpdated(TwoBatchBackend):
    """A plan is cached by pool: for as many requests it gets another page table, and keeps its lengths."""

    def plan(self, batch: ForwardBatch) -> Metadata:
        found, kept = super().plan(batch), _PLANS.get(self.context.kv_pool)
        if kept is not None and kept[0] is not self and len(kept[1].kv_lens) == len(found.kv_lens):
            found.kv_lens, found.chunk = kept[1].kv_lens, kept[1].chunk
        _PLANS[self.context.kv_pool] = self, found
        return found


_LAST: WeakKeyDictionary[KVPool, Metadata] = WeakKeyDictionary()


@fault(
    "vLLM #50945 (what a builder keeps on the kernel's object)",
    "completes matches-oracle finite output-written",
    _ONE_BATCH_OF_TWO,
    modes="extend",
    executions="eager",
)
class RowsOfTheBatchPlannedLast(TwoBatchBackend):
    """Offsets of rows are kept by an object that the plans of both batches fill before the first of them runs."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        assert self.metadata is not None
        _LAST[self.context.kv_pool] = self.metadata

    def row_of(self, meta: Metadata, tokens: int) -> torch.Tensor:
        last = _LAST[self.context.kv_pool].cu_seqlens_q
        meta.cu_seqlens_q[: len(last)] = last[: len(meta.cu_seqlens_q)]
        return super().row_of(meta, tokens)


_BUFFERS: WeakKeyDictionary[KVPool, Metadata] = WeakKeyDictionary()


@fault(
    "general (persistent buffers of a graph that are kept by pool)",
    "matches-oracle writes-own-kv reads-own-kv finite",
    _ONE_BATCH_OF_TWO,
    modes="decode target-verify",
    executions="graph",
)
class GraphBuffersOfThePool(TwoBatchBackend):
    """The graphs of both batches read the same persistent buffers, which hold the plan of the second one."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.buffers = _BUFFERS.setdefault(self.context.kv_pool, self.buffers)


@fault(
    "general (vector loads of 16 bytes from the first element on)",
    "matches-oracle finite reads-own-kv",
    _ONE_BATCH_OF_TWO,
    modes="decode",
    executions="graph",
)
class LengthsReadFromAMultipleOf16Bytes(TwoBatchBackend):
    """Lengths are loaded 16 bytes at a time, from the address of the first one rounded down."""

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        given = batch.seq_lens[: batch.batch_size]
        first = given.data_ptr() % 16 // given.itemsize
        lens = given.as_strided(given.shape, (1,), given.storage_offset() - first)
        return super().plan_lengths(batch, counts) + (lens - given).to(torch.int32)


_OUTPUTS: WeakKeyDictionary[KVPool, torch.Tensor] = WeakKeyDictionary()


@fault(
    "general (one output buffer for the batches of a step)", "matches-oracle", _ONE_BATCH_OF_TWO, modes="decode extend",
    executions="eager",
)  # fmt: skip
class OutputBufferOfThePool(TwoBatchBackend):
    """All instances of a pool return one buffer, so the second batch overwrites the output of the first."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        kept = _OUTPUTS.get(self.context.kv_pool)
        if self.in_graph or kept is None or kept.numel() < out.numel():
            kept = _OUTPUTS[self.context.kv_pool] = torch.empty_like(out)
        return kept.view(-1)[: out.numel()].view(out.shape).copy_(out)
