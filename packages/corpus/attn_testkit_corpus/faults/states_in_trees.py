"""The parent of faults of drafts that branch: states and windows of a node's parent."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import ForwardBatch, ForwardMode, VerifyInput

from .states import StateParent

_VERIFY = frozenset({ForwardMode.TARGET_VERIFY})


class TreesParent(StateParent):
    """A right target-verify of GDN whose drafts may branch, with a commit of the last accepted node."""

    capabilities = StateParent.capabilities.with_changes(
        eager=_VERIFY,
        graph=_VERIFY,
        heads={"families": {"gdn"}},
        bounds={"max_topk": 2},
        state=replace(StateParent.declared_state(), trees={"gdn"}),
    )

    parents: torch.Tensor | None = None
    """[bs, N] int64: parent of each node, the root its own; None for chains."""

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        size = max_bs, self.context.num_draft_tokens
        self.in_graphs = torch.zeros(size, dtype=torch.int64, device=self.context.device)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.parents = self.found(batch)
        self.init_forward_metadata_in_graph(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        found = self.found(batch)
        self.parents = None if found is None else self.in_graphs[: batch.batch_size, : found.shape[1]]
        if found is not None and self.parents is not None and self.refreshes(in_capture):
            self.parents[: len(found)] = found

    def refreshes(self, in_capture: bool) -> bool:
        """True if a graph gets the links of this batch."""
        return True

    def found(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The parents that the links of a batch name; None for chains."""
        spec = batch.spec_info
        if not isinstance(spec, VerifyInput) or spec.topk == 1 or spec.retrieve_next_token is None:
            return None
        assert spec.retrieve_next_sibling is not None
        nodes = torch.arange(spec.retrieve_next_token.shape[1], device=spec.retrieve_next_token.device)
        # [bs, N, N]: node i names node j as its first child, as its next sibling.
        child, sibling = (
            (each[..., None] == nodes) & (each[..., None] >= 0)
            for each in (spec.retrieve_next_token, spec.retrieve_next_sibling)
        )
        children, more = child.float(), child.float()
        for _ in nodes:
            more = more @ sibling.float()
            children = children + more
        parents = self.named(children.argmax(1), sibling)
        parents[:, 0] = 0
        return parents

    def named(self, parents: torch.Tensor, sibling: torch.Tensor) -> torch.Tensor:
        """[bs, N]: nodes whose states are continued. ``sibling`` [bs, N, N]: node j is the next sibling of node i."""
        return parents

    @override
    def continued(self, token: int, window: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.parents is None:
            return window, state
        if not token:
            self.behind: list[tuple[torch.Tensor, torch.Tensor]] = []
            return window, state
        self.behind.append((window, state))
        return self.of_node(0, self.parents[:, token], window), self.of_node(1, self.parents[:, token], state)

    def of_node(self, part: int, node: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """[bs, ...]: windows (part 0) or states (1) after ``node`` [bs]; ``last`` is the one after the node before."""
        every = torch.stack([each[part] for each in self.behind], 1)
        return every[torch.arange(len(node), device=node.device), node]
