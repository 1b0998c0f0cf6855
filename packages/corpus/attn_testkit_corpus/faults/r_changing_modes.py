"""Class R, requests that change their mode: verified, decoded without a draft, and verified again."""

from __future__ import annotations

import torch

from attn_testkit.contract import BackendContext, ForwardBatch, StateInput, StateLayer

from .catalogue import fault, helper
from .states import StateParent


class CommittedStatesKept(StateParent):
    """A backend that keeps a copy of what each commit stored. A verify reads the copy if the request has its slot, its
    row of the table and as many tokens as at the commit, and else the pool.
    """

    capabilities = StateParent.capabilities.with_changes(graph=())

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        rows = len(self.states.req_to_state)
        self.copies = {
            layer.layer_id: [part.new_zeros(rows, *part.shape[1:]) for part in self.pools(layer)]
            for layer in self.states.layers
        }
        """Copies of windows and states by the row of the request table."""
        self.tokens = torch.full((rows,), -1, dtype=torch.int64, device=context.device)
        """[rows]: tokens in the copy of each row; -1: there is none."""
        self.slots_of_copies = torch.zeros_like(self.tokens)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.rows = batch.req_pool_indices.long()
        self.prefixes = batch.seq_lens.long() - (0 if self.verifies else self.counts)
        if not self.verifies:
            self.tokens[self.rows] = self.tokens_after(self.tokens[self.rows])

    @helper
    def tokens_after(self, tokens: torch.Tensor) -> torch.Tensor:
        """[bs] int64: tokens in the copies after a step without drafts, of those before it."""
        return torch.full_like(tokens, -1)

    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        window, state = super().before(layer)
        if not self.verifies:
            return window, state
        has_copy = (self.tokens[self.rows] == self.prefixes) & (self.slots_of_copies[self.rows] == self.index)
        copies = (part[self.rows] for part in self.copies[layer.layer_id])
        window, state = (
            torch.where(has_copy.view(-1, *[1] * (copy.dim() - 1)), copy, own)
            for copy, own in zip(copies, (window, state), strict=True)
        )
        return window, state

    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        super().commit(steps, state)
        self.tokens[self.rows], self.slots_of_copies[self.rows] = self.prefixes + steps.long() + 1, self.index
        for layer in self.states.layers:
            for copy, part in zip(self.copies[layer.layer_id], self.pools(layer), strict=True):
                copy[self.rows] = part[self.index]


@fault(
    "vLLM #52942 (the accepted state stays in a later slot when a decode without a draft follows)",
    "lossless",
    modes="target-verify",
    executions="eager",
    modelled="upstream the state is in another slot of the request; here it is in a copy that the backend keeps",
)
class CopyOfACommitAgedByDecodes(CommittedStatesKept):
    """A decode without a draft counts its token in the kept copy, too, but does not change the copy's state."""

    def tokens_after(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.where(tokens == self.prefixes, tokens + self.counts, -1)
