"""Class G: numbers of heads that follow from the wrong ranks of a server."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext

from .catalogue import fault
from .parent import Metadata, PlannedBackend


class HeadsOfRanksParent(PlannedBackend):
    """A right backend whose scratch and kernel have the heads of the model, divided by the ranks of attention."""

    def heads(self, context: BackendContext) -> int:
        """Query heads of a layer on this rank."""
        return max(1, context.num_attention_heads // self.ranks(context))

    def ranks(self, context: BackendContext) -> int:
        """Ranks among which heads are dealt."""
        return context.attn_tp_size

    @override
    def new_workspace(self, numbers: int) -> torch.Tensor:
        most = max(layer.tp_q_head_num for layer in self.context.layers)
        return super().new_workspace(numbers // most * self.heads_of_scratch(self.context))

    def heads_of_scratch(self, context: BackendContext) -> int:
        """Heads for which the scratch has room."""
        return self.heads(context)


@fault("sglang #12961", "completes")
class ScratchOfServerRanks(HeadsOfRanksParent):
    """The scratch has room for the heads of the model divided by all ranks of the server, not by those of attention."""

    @override
    def ranks(self, context: BackendContext) -> int:
        return context.tp_size


@fault("sglang #25031", "matches-oracle")
class MetadataOfServerRanks(HeadsOfRanksParent):
    """The scheduler's metadata has the heads of the model divided by all ranks, and a kernel leaves out the others."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        planned = max(1, self.context.num_attention_heads // self.context.tp_size)
        out[:, planned:] = 0
        return out


@fault("sglang #19247", "matches-oracle", "head")
class KernelForHeadsOfServerRanks(HeadsOfRanksParent):
    """A kernel for few heads is chosen by the heads of the model divided by all ranks, and a rank of attention has
    more: these are computed as the first ones."""

    few = 2

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        heads = self.context.num_attention_heads // self.context.tp_size
        if heads > self.few or self.context.tp_size == 1:
            return out
        return out[:, torch.arange(layer.tp_q_head_num, device=out.device) % self.few]
