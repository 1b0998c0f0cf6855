"""Class R: drafts that branch: the state and the window of a node's parent, and the committed node."""

from __future__ import annotations

import torch

from .catalogue import fault
from .states_in_trees import TreesParent


@fault(
    "general (links to the next sibling, as in SGLang's causal_conv1d_update)",
    "matches-oracle state-matches-oracle",
    "sibling",
    modes="target-verify",
)
class StateOfTheSibling(TreesParent):
    """A node that has a sibling before it continues the sibling, not the parent of both."""

    def named(self, parents: torch.Tensor, sibling: torch.Tensor) -> torch.Tensor:
        return torch.where(sibling.any(1), sibling.float().argmax(1), parents)


@fault(
    "general (SGLang's Mamba2 and Lightning kernels know no trees)",
    "matches-oracle state-matches-oracle",
    "chain",
    modes="target-verify",
)
class TreeTakenForAChain(TreesParent):
    """Each node continues the row before it."""

    def named(self, parents: torch.Tensor, sibling: torch.Tensor) -> torch.Tensor:
        nodes = torch.arange(parents.shape[1], device=parents.device)
        return (nodes - 1).expand_as(parents).clone()


@fault(
    "general (a recurrence by parents and a convolution by rows)",
    "conv-window-exact matches-oracle",
    modes="target-verify",
)
class WindowOfTheParentLost(TreesParent):
    """States follow the parents of nodes, but the convolution reads the rows before."""

    def of_node(self, part: int, node: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return super().of_node(part, node, last) if part else last


@fault(
    "general (SGLang copies links a second time, after the draft: update_verify_buffers_to_fill_after_draft)",
    "replay-follows-batch matches-oracle",
    modes="target-verify",
    executions="graph",
)
class LinksOfTheCapture(TreesParent):
    """A replay does not fill the links that the graph reads."""

    def refreshes(self, in_capture: bool) -> bool:
        return in_capture


@fault(
    "general (in a chain the last accepted node is the accepted length less one)",
    "state-matches-oracle conv-window-exact",
    modes="target-verify",
)
class CommitsByDepth(TreesParent):
    """The number of accepted nodes is used as the index of the last one, which is right only for chains."""

    def accepted(self, steps: torch.Tensor) -> torch.Tensor:
        steps = steps.long()
        if self.parents is None:
            return steps
        node, depth = steps.clamp(min=0), torch.zeros_like(steps)
        for _ in range(self.parents.shape[1]):
            depth = depth + (node > 0)
            node = self.parents[: len(steps)].gather(1, node[:, None])[:, 0]
        return torch.where(steps < 0, steps, depth)
