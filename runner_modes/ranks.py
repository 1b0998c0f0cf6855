"""Ranks of decode context parallelism in one process: R instances of a backend behind the interface of one.

The harness plans, captures and replays a single backend. ``Ranks`` is this backend: it hands each call to the instance
of every rank, with the batch as that rank's server would have it. A step's tensors hold the values of all ranks, in the
static buffers of graphs too, and a rank gets its row of them: so no mode depends on ranks. All work is device work, and
may be captured. ``kv_splits.py`` asks for the partial result of each rank and merges them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    KVSplit,
    VerifyInput,
    VerifyMask,
)

from .indexing import replica_of


def context_of_rank(context: BackendContext, rank: int) -> BackendContext:
    """The context of the instance that is a rank: it has the pool and the request table of the rank, and its split."""
    group = context.groups[rank]
    return replace(
        context,
        kv_pool=group.kv_pool,
        req_to_token=group.req_to_token,
        kv_groups=(),
        kv_splits=(context.kv_splits[rank],),
        index_pool=context.index_pool and replica_of(context.index_pool, rank, context.dcp_world_size),
    )


class Ranks(AttentionBackend):
    """R instances of a backend, each with a separate KV pool and request table."""

    def __init__(self, backend_class: type[AttentionBackend], context: BackendContext, *, reverse: bool) -> None:
        """Construct the instances in the order of the ranks. Errors of their constructor are passed on.

        ``reverse``: the last rank plans first.
        """
        self._order = range(len(context.kv_splits))[:: -1 if reverse else 1]
        self.context = context
        self.instances = [backend_class(context_of_rank(context, rank)) for rank in range(len(context.kv_splits))]
        self.kernels = self.instances[0].kernels
        self._selected: list[torch.Tensor] = []

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Raise ``NotImplementedError``: ranks are asked for one partial result at a time."""
        raise NotImplementedError("ranks return partial results: call forward_return_lse")

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        part: KVSplit,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial result of the rank of ``part``, as ``AttentionBackend.forward_return_lse`` returns it."""
        named = more if save_kv_cache else {**more, "save_kv_cache": False}
        if self._selected and named.get("selected") is self._selected[0]:
            named = {**named, "selected": self._selected[part.rank]}
        own = self._of_rank(batch, part.rank)
        return self.instances[part.rank].forward_return_lse(q, k, v, layer, own, **named, part=part)

    def store_index(self, k_index: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Store index keys in the index pool of every rank."""
        for instance, own in self._each(batch):
            instance.store_index(k_index, layer, own)

    def select(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Selection of rank 0. Each rank attends to its own selection, if it gets this one back."""
        self._selected = [
            instance.select(q_index, weights, layer, self._of_rank(batch, rank))
            for rank, instance in enumerate(self.instances)
        ]
        return self._selected[0]

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager step on every rank."""
        self._copy_masks(batch)
        for instance, own in self._each(batch):
            instance.init_forward_metadata(own)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the graph state of every rank."""
        for instance in self.instances:
            instance.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Prepare a capture or a replay on every rank."""
        self._copy_masks(batch)
        named = {"in_capture": True} if in_capture else {}
        for instance, own in self._each(batch):
            instance.init_forward_metadata_out_graph(own, **named)

    def init_forward_metadata_before_capture(self, batch: ForwardBatch) -> None:
        """Prepare a capture for the second time on every rank."""
        for instance, own in self._each(batch):
            instance.init_forward_metadata_before_capture(own)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Do the device work of a plan on every rank."""
        for instance, own in self._each(batch):
            instance.init_forward_metadata_in_graph(own)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return ``seq_lens`` of a padded request on rank 0."""
        return self.instances[0].get_cuda_graph_seq_len_fill_value()

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The mask buffer of rank 0, which the kit fills; the other ranks get copies in theirs."""
        return self.instances[0].verify_mask

    def _each(self, batch: ForwardBatch) -> Iterator[tuple[AttentionBackend, ForwardBatch]]:
        """Instances with their batches, in the order in which they run."""
        return ((self.instances[rank], self._of_rank(batch, rank)) for rank in self._order)

    def _copy_masks(self, batch: ForwardBatch) -> None:
        """Copy the tree masks of a step, which are in the mask buffer of rank 0, to the buffers of the others."""
        filled, *others = (instance.verify_mask for instance in self.instances)
        if filled is None or not isinstance(batch.spec_info, VerifyInput):
            return
        for other in others:
            if other is not None:
                other.buffer.copy_(filled.buffer)

    def _of_rank(self, batch: ForwardBatch, rank: int) -> ForwardBatch:
        """The batch as the rank's server has it."""
        locs, lens = batch.group_cache_locs, batch.dcp_local_seq_lens
        assert locs is not None, "batches of ranks have the slots of every rank"
        assert lens is not None, "batches of ranks have the lengths of every rank"
        changes: dict[str, Any] = {
            "out_cache_loc": locs[rank],
            "dcp_local_seq_lens": lens[rank],
            "spec_info": self._spec_of_rank(batch.spec_info, rank),
        }
        if not isinstance(batch, SimpleNamespace):
            # The data that a backend keeps with a batch outlives copies of the batch.
            extras = cast(dict[str, Any], batch.extras.setdefault(f"rank {rank}", {}))
            return replace(batch, group_cache_locs=None, extras=extras, **changes)
        fields = {name: value for name, value in vars(batch).items() if name != "group_cache_locs"}
        return cast(ForwardBatch, SimpleNamespace(**{**fields, **changes}))

    def _spec_of_rank(self, spec: Any, rank: int) -> Any:
        """``spec_info`` with the rank's own mask buffer, if it has the mask buffer of rank 0."""
        filled, own = self.verify_mask, self.instances[rank].verify_mask
        mask = spec.custom_mask if isinstance(spec, VerifyInput) else None
        if mask is None or filled is None or own is None or mask.data_ptr() != filled.buffer.data_ptr():
            return spec
        return replace(spec, custom_mask=own.buffer[: len(mask)])
