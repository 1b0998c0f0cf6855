"""Class R: requests that continue a state of a prefix cache in another slot."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch, StateLayer

from .catalogue import fault
from .states_of_servers import SourcesParent


@fault(
    "general (vLLM: block_idx_last_computed_token and block_idx_last_scheduled_token)",
    "reads-own-state finite",
    modes="decode extend",
)
class ReadsTheSlotThatItWrites(SourcesParent):
    """The state is read from the request's own slot, not from that of the prefix cache."""

    def continued_slots(self, sources: torch.Tensor) -> torch.Tensor:
        return self.index


@fault(
    "general (vLLM #56196 stores a window in the block that was read)",
    "writes-own-state state-matches-oracle",
    "prefix cache",
    modes="decode extend",
)
class WritesTheSlotThatItReads(SourcesParent):
    """The state is updated in place, so the prefix cache then holds the state of another prompt."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        super().store(pool, rows, self.sources)
        super().store(pool, rows, index)


@fault("general; mlx-swift-lm #218", "reads-own-state finite conv-window-exact", modes="decode extend")
class ContinuesAStateWithoutItsWindow(SourcesParent):
    """The recurrent state is read from the prefix cache, and the window of the convolution from the request's slot."""

    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loaded(self.pools(layer)[0], self.index, self.begun), super().before(layer)[1]


@fault(
    "general (SGLang copies before the layers read: _maybe_execute_deferred_mamba_cow_and_clear)",
    "state-matches-oracle conv-window-exact state-counts-tokens",
    modes="decode extend",
)
class SourceCopiedBehindTheUpdate(SourcesParent):
    """The cached state is copied to the request's slot after the step stored its own there."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        super().store(pool, rows, index)
        continues = self.begun & (self.sources != self.index)
        super().store(pool, torch.where(continues.view(-1, *[1] * (pool.dim() - 1)), pool[self.sources], rows), index)


@fault("general", "state-matches-oracle conv-window-exact state-counts-tokens", modes="decode extend")
class OneResultOfASharedSource(SourcesParent):
    """Requests are grouped by the state which they continue, and all requests of a group get the result of the
    first."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        alike = (self.sources[:, None] == self.sources[None]) & self.begun[:, None] & self.begun[None]
        alike = alike | torch.eye(len(index), dtype=torch.bool, device=index.device)
        super().store(pool, rows[alike.int().argmax(1)], index)


@fault(
    "general (SGLang tracks the last multiple of the chunk length)",
    "matches-oracle state-matches-oracle conv-window-exact state-counts-tokens",
    modes="extend",
)
class SnapshotOfTheFirstBoundary(SourcesParent):
    """The prefix cache stores the state after the first chunk of a prompt under the length of the last boundary."""

    def copied_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clamp(max=16)


@fault(
    "general; vllm-ascend #10901 (stale slots in a replay)",
    "replay-follows-batch reads-own-state finite matches-oracle",
    modes="decode",
    executions="graph",
)
class SourcesOfTheCapture(SourcesParent):
    """A graph reads the source slots of its capture, when each request continued its own state."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        if torch.cuda.is_current_stream_capturing():
            self.sources = self.index
