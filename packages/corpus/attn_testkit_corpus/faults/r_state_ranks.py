"""Class R: states that pass from rank to rank in prefill context parallelism."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch, StateLayer

from .catalogue import fault
from .with_row_ranks import StateRankParent

_CHECKS = "matches-oracle state-matches-oracle conv-window-exact finite"


@fault("vllm-ascend #9479, #11508", _CHECKS, modes="extend")
class RankBeginsFromZeros(StateRankParent):
    """A rank decides by the prefix of the request whether there is a state, and not by the rows before its own."""

    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        assert batch.extend_prefix_lens is not None
        return batch.extend_prefix_lens > 0


@fault("rtp-llm #1299; vllm-ascend #10907", _CHECKS, modes="extend")
class RankContinuesTheStateBeforeTheStep(StateRankParent):
    """A rank continues the state that its request had before the step, which it read at the plan."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.fresh = torch.zeros_like(self.begun)
        if batch.extend_prefix_lens is not None:
            self.fresh = batch.extend_prefix_lens == 0
        self.held = {layer.layer_id: self.window_and_state(layer) for layer in self.states.layers}

    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        window, state = self.held[layer.layer_id]
        flags = self.fresh.view(-1, 1, 1)
        return window.masked_fill(flags, 0.0), state.masked_fill(flags[..., None], 0.0)


@fault("rtp-llm #1299; vllm-ascend #11195", _CHECKS, modes="extend")
class WindowOfRankIsEmpty(StateRankParent):
    """The state passes from rank to rank, but the window of the convolution is empty on each later one."""

    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        window, state = super().before(layer)
        return (torch.zeros_like(window) if self.is_later_rank() else window), state


@fault("vllm-ascend #12009, #10172", _CHECKS, modes="extend")
class RankWithoutRowsClearsTheState(StateRankParent):
    """A rank without rows of a request stores zeros, which are what its empty loop has computed."""

    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        window, state = super().before(layer)
        return window, state.masked_fill(self.empty().view(-1, 1, 1, 1), 0.0)


@fault("vllm-ascend #11195", _CHECKS, modes="extend")
class OneRowOnARankIsFresh(StateRankParent):
    """A rank with one row of a request takes it for the first token of a prompt."""

    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        assert batch.extend_seq_lens is not None
        takes_one = (batch.extend_seq_lens == 1) & (self.context.pcp_world_size > 1)
        return super().begins(batch) & ~takes_one
