"""Ranks of prefill context parallelism in one process: R instances of a backend behind the interface of one.

As a server does, ``RowRanks`` deals the rows of a prompt, gathers k and v, and puts the outputs of the ranks in order.
Layers that keep a state run from rank 0 on, in one pool of states: each continues what the one before it stored there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

from attn_testkit.cases.features.row_ranks import row_splits_of
from attn_testkit.cases.fields import Fields
from attn_testkit.contract import AttentionBackend, AttentionLayer, BackendContext, ForwardBatch, RowSplit, StateInput

from .collectives import RanksAsThreads
from .returned import check_returned


def context_of_row_rank(context: BackendContext, split: RowSplit) -> BackendContext:
    """The context of the instance that is a rank: it has a pool and a request table of its own."""
    group = context.groups[split.rank]
    return replace(context, kv_pool=group.kv_pool, req_to_token=group.req_to_token, kv_groups=(), row_split=split)


class RunsRanks(Protocol):
    """Runs one call on the instance of every rank."""

    def __call__(self, calls: Sequence[Callable[[], Any]], order: Sequence[int]) -> list[Any]:
        """Results of ``calls``, one for each rank. ``order``: the ranks in the order in which they may run."""


def by_turns(calls: Sequence[Callable[[], Any]], order: Sequence[int]) -> list[Any]:
    """Run the ranks one after another."""
    found: dict[int, Any] = {rank: calls[rank]() for rank in order}
    return [found[rank] for rank in range(len(calls))]


@dataclass(frozen=True)
class _OfRank:
    """The batch of one rank."""

    batch: ForwardBatch
    rows: torch.Tensor
    """[T_r] int64: ``ForwardBatch.pcp_rows``."""


class RowRanks(AttentionBackend):
    """R instances of a backend, each of which computes its rows of every prompt."""

    def __init__(
        self, backend_class: type[AttentionBackend], context: BackendContext, case: Fields, *, reverse: bool
    ) -> None:
        """Construct the instances. Errors of their constructor are passed on.

        ``reverse``: the last rank runs first.
        """
        declared = backend_class.capabilities.prefill_ranks
        self._splits = row_splits_of(case)
        self._gathers = declared is not None and declared.gathers
        in_order = range(len(self._splits))
        self._order = in_order[:: -1 if reverse else 1]
        self.context = context
        self._run: RunsRanks = RanksAsThreads(len(self._splits)) if self._gathers else by_turns
        self.instances: list[AttentionBackend] = self._run(
            [lambda split=split: backend_class(context_of_row_rank(context, split)) for split in self._splits],  # type: ignore[misc]
            in_order,
        )
        self.kernels = self.instances[0].kernels

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager step on every rank."""
        self._on_ranks(batch, lambda instance, own: instance.init_forward_metadata(own.batch))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Raise ``NotImplementedError``: prompts of ranks run without graphs."""
        raise NotImplementedError("prefill context parallelism has no graphs")

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Outputs of all ranks in the order of the batch, [T, Hq, Dv]. Raises ``ShapeError``; passes errors on."""
        named = {} if save_kv_cache else {"save_kv_cache": False}
        all_keys = self.context.state is None and not self._gathers

        def on_rank(instance: AttentionBackend, own: _OfRank) -> torch.Tensor:
            keys = (k, v) if all_keys else tuple(None if each is None else each[own.rows] for each in (k, v))
            return instance.forward(q[own.rows], *keys, layer, own.batch, **named)  # type: ignore[arg-type, call-arg]

        heads, dim = layer.tp_q_head_num, layer.v_head_dim
        whole = torch.empty(q.shape[0], heads, dim, dtype=self.context.dtype, device=self.context.device)
        for split, own, out in zip(self._splits, self._each(batch), self._on_ranks(batch, on_rank), strict=True):
            rows = len(own.rows)
            shapes = ((rows, heads, dim), (rows, heads * dim))
            name = f"layer {layer.layer_id} on {split}"
            check_returned(name, out, shapes, self.context.dtype, self.context.device)
            whole[own.rows] = out.reshape(rows, heads, dim)
        return whole

    def _on_ranks(self, batch: ForwardBatch, call: Callable[[AttentionBackend, _OfRank], Any]) -> list[Any]:
        pairs = zip(self.instances, self._each(batch), strict=True)
        calls = [lambda instance=instance, own=own: call(instance, own) for instance, own in pairs]
        return self._run(calls, self._order)

    def _each(self, batch: ForwardBatch) -> list[_OfRank]:
        """Batches of the ranks. They stay the same objects from the plan to the last layer."""
        kept = cast("list[_OfRank] | None", batch.extras.get("row ranks"))
        if kept is None:
            kept = [*self._made(batch)]
            batch.extras["row ranks"] = kept
        return kept

    def _made(self, batch: ForwardBatch) -> Iterator[_OfRank]:
        rows, new, locs = batch.pcp_rows, batch.extend_seq_lens, batch.group_cache_locs
        assert rows is not None, "batches of ranks have the rows of every rank"
        assert new is not None, "prompts have their lengths on the device"
        assert batch.extend_seq_lens_cpu is not None, "prompts have their lengths on the host"
        assert locs is not None, "batches of ranks have the slots of every rank"
        on_host, start = torch.tensor(batch.extend_seq_lens_cpu), 0
        for split in self._splits:
            lens, held = split.lens(new), split.lens(on_host).tolist()
            own = rows[start : start + sum(held)]
            start += len(own)
            changes: dict[str, Any] = {
                "input_ids": batch.input_ids[own],
                "positions": batch.positions[own],
                "out_cache_loc": locs[split.rank],
                "group_cache_locs": None,
                "extend_num_tokens": sum(held),
                "extend_seq_lens": lens,
                "extend_seq_lens_cpu": held,
                "extend_start_loc": (lens.cumsum(0) - lens).to(torch.int32),
                "pcp_rows": own,
                "state": self._state_of(batch, split),
                "extras": {},
            }
            if batch.query_start_loc is not None:
                ends = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
                changes["query_start_loc"] = ends.to(torch.int32)
            yield _OfRank(replace(batch, **changes), own)

    def _state_of(self, batch: ForwardBatch, split: RowSplit) -> StateInput | None:
        """States of a rank: a request has one if any of its tokens precedes the rows of the rank."""
        if batch.state is None:
            return None
        assert batch.extend_seq_lens is not None
        assert batch.extend_prefix_lens is not None
        before = batch.extend_prefix_lens + split.start(split.rank, batch.extend_seq_lens)
        return replace(batch.state, has_initial_state=before > 0)
