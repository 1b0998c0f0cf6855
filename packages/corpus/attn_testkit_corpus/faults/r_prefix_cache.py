"""Class R: requests that continue a state of a prefix cache, in a slot of their own."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import ForwardBatch, ForwardMode, StateLayer

from .catalogue import fault
from .states_of_servers import SourcesParent

_BOTH = (ForwardMode.DECODE, ForwardMode.EXTEND)
_EXTEND = (ForwardMode.EXTEND,)


@fault(
    slug="reads-the-slot-that-it-writes",
    source="general (vLLM: block_idx_last_computed_token and block_idx_last_scheduled_token)",
    modes=_BOTH,
    checks=("reads-own-state", "finite"),
)
class ReadsTheSlotThatItWrites(SourcesParent):
    """The state is read from the request's own slot, and not from that of the prefix cache."""

    @override
    def continued_slots(self, sources: torch.Tensor) -> torch.Tensor:
        return self.index


@fault(
    slug="writes-the-slot-that-it-reads",
    source="general (vLLM #56196 stores a window in the block that was read)",
    modes=_BOTH,
    checks=("writes-own-state", "state-matches-oracle"),
    hint="prefix cache",
)
class WritesTheSlotThatItReads(SourcesParent):
    """The state is updated in place, so that the prefix cache has the state of another prompt."""

    @override
    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        super().store(pool, rows, self.sources)
        super().store(pool, rows, index)


@fault(
    slug="continues-a-state-without-its-window",
    source="general; mlx-swift-lm #218",
    modes=_BOTH,
    checks=("reads-own-state", "finite", "conv-window-exact"),
)
class ContinuesAStateWithoutItsWindow(SourcesParent):
    """The recurrent state is read from the prefix cache, and the window of the convolution from the request's slot."""

    @override
    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loaded(self.pools(layer)[0], self.index, self.begun), super().before(layer)[1]


@fault(
    slug="source-copied-behind-the-update",
    source="general (SGLang copies before the layers read: _maybe_execute_deferred_mamba_cow_and_clear)",
    modes=_BOTH,
    checks=("state-matches-oracle", "conv-window-exact", "state-counts-tokens"),
)
class SourceCopiedBehindTheUpdate(SourcesParent):
    """The cached state is copied to the request's slot after the step stored its own there."""

    @override
    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        super().store(pool, rows, index)
        continues = self.begun & (self.sources != self.index)
        super().store(pool, torch.where(continues.view(-1, *[1] * (pool.dim() - 1)), pool[self.sources], rows), index)


@fault(
    slug="one-result-of-a-shared-source",
    source="general",
    modes=_BOTH,
    checks=("state-matches-oracle", "conv-window-exact", "state-counts-tokens"),
)
class OneResultOfASharedSource(SourcesParent):
    """Requests are grouped by the state which they continue, and all of a group get the result of the first."""

    @override
    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        alike = (self.sources[:, None] == self.sources[None]) & self.begun[:, None] & self.begun[None]
        alike = alike | torch.eye(len(index), dtype=torch.bool, device=index.device)
        super().store(pool, rows[alike.int().argmax(1)], index)


@fault(
    slug="snapshot-of-the-first-boundary",
    source="general (SGLang tracks the last multiple of the chunk length)",
    modes=_EXTEND,
    checks=("matches-oracle", "state-matches-oracle", "conv-window-exact", "state-counts-tokens"),
)
class SnapshotOfTheFirstBoundary(SourcesParent):
    """The prefix cache keeps the state behind the first chunk of a prompt under the length of the last boundary."""

    @override
    def copied_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clamp(max=16)


@fault(
    slug="sources-of-the-capture",
    source="general; vllm-ascend #10901 (stale slots in a replay)",
    modes=[ForwardMode.DECODE],
    executions=["graph"],
    checks=("replay-follows-batch", "reads-own-state", "finite", "matches-oracle"),
)
class SourcesOfTheCapture(SourcesParent):
    """A graph reads the slots that were continued when it was captured: each request its own."""

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        if torch.cuda.is_current_stream_capturing():
            self.sources = self.index
