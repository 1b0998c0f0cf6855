"""Class J: workspaces and buffers that are sized for the heads of the first layer, but used by all layers."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardMode

from .by_layer import ByLayerBackend
from .catalogue import fault
from .parent import Metadata

_MODES = tuple(mode for mode in ForwardMode if not mode.is_draft_decode())
_FIRST = "the first layer"


@fault(
    "sglang #32625",
    "finite matches-oracle",
    _FIRST,
    modes=_MODES,
    modelled="upstream partial results were written past the end; here they overwrite the memory after them",
)
class WorkspaceOfTheFirstLayer(ByLayerBackend):
    """The workspace of partial results is sized for the first layer, and a layer with more heads writes past it."""

    def partial_views(self, bs: int, width: int, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        acc, lse = super().partial_views(bs, width, layer)
        first = self.context.layers[0]
        end = self.context.max_bs * self.max_splits * self.width * first.tp_q_head_num * first.v_head_dim
        return acc, self.workspace[min(end, acc.numel()) :][: lse.numel()].view(lse.shape)


@fault(
    "general; sglang #32625", "finite matches-oracle", _FIRST, modes=_MODES, modelled="as workspace-of-the-first-layer"
)
class SplitWorkspaceOfTheFirstLayer(WorkspaceOfTheFirstLayer):
    """The workspace has the first layer's size; contexts of up to 512 keys are one split and need none."""

    one_split = 512

    def partial_views(self, bs: int, width: int, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        if self.context.max_context_len <= self.one_split:
            return ByLayerBackend.partial_views(self, bs, width, layer)
        return super().partial_views(bs, width, layer)


@fault(
    "general",
    "matches-oracle",
    _FIRST,
    modes=_MODES,
    modelled="a row runs into the next one, instead of past the end as well",
)
class OutputBufferOfTheFirstLayer(ByLayerBackend):
    """One buffer holds the output of every layer, with rows as wide as those of the first."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        first = context.layers[0]
        self.row = first.tp_q_head_num * first.v_head_dim
        widest = max(layer.tp_q_head_num * layer.v_head_dim for layer in context.layers)
        size = context.max_num_tokens * self.row + widest
        self.output = torch.zeros(size, dtype=context.dtype, device=context.device)

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        rows = out.flatten(1)
        # The part of a row past the first layer's width is written over by the next row.
        kept = min(self.row, rows.shape[1])
        self.output[: len(rows) * self.row].view(-1, self.row)[:, :kept] = rows[:, :kept]
        return self.output.as_strided(rows.shape, (self.row, 1)).clone().view(out.shape)
