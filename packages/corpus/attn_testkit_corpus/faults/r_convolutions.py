"""Class R, convolutions without a recurrence: the only memory of a request is a window, and a draft model has such
layers, too."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import ForwardBatch, ForwardMode, StateLayer

from .catalogue import fault
from .states_of_servers import SnapshotsParent

_MODES = SnapshotsParent.capabilities.eager | {ForwardMode.DRAFT_EXTEND_V2}


class ConvParent(SnapshotsParent):
    """A right backend of short convolutions, as LFM2 and Inkling have them, with copies for a prefix cache."""

    capabilities = SnapshotsParent.capabilities.with_changes(
        eager=_MODES,
        graph=SnapshotsParent.capabilities.graph | {ForwardMode.DRAFT_EXTEND_V2},
        heads={"families": {"conv"}, "gqa_ratios": {1}},
        state={"conv_widths": {3}},
    )

    @override
    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(0), torch.empty(0)

    @override
    def token(
        self, rows: torch.Tensor, state: torch.Tensor, gates: tuple[torch.Tensor, torch.Tensor], layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return state, rows.view(-1, layer.v_heads, layer.v_dim)


@fault("sglang #35042", "completes", modes="draft-extend-v2", executions="graph")
class PrefixLengthsOfACapture(ConvParent):
    """The plan of copies counts the requests by extend_prefix_lens, which the batch of a draft-extend lacks in a
    graph."""

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.state is not None and batch.state.snapshot is not None and batch.forward_mode.is_draft_extend(True):
            assert min(batch.batch_size, len(batch.extend_prefix_lens)) > 0  # type: ignore[arg-type]


@fault("transformers #46588, #46633", "matches-oracle", "the last rows of the request before it", modes="extend")
class ConvolvesAcrossRequests(ConvParent):
    """The convolution does not stop at the first row of a request: its taps read the packed rows before that row."""

    rows_of_step: torch.Tensor

    @override
    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        self.rows_of_step = mixed if batch.forward_mode is ForwardMode.EXTEND else mixed[:0]
        return super().forward(mixed, a, b, layer, batch)

    @override
    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        window, state = super().before(layer)
        if not len(self.rows_of_step):
            return window, state
        columns = torch.arange(-window.shape[-1], 0, device=window.device)
        at = (self.counts.cumsum(0) - self.counts)[:, None] + columns
        packed = self.rows_of_step[at.clamp(min=0)].transpose(1, 2)
        return torch.where((at >= 0)[:, None], packed, window), state


@fault("sglang #36951", "conv-window-exact", modes="decode extend draft-extend-v2")
class NoCopyWithoutAState(ConvParent):
    """Copies for a prefix cache are left out if the state has no elements, and the window is not copied either."""

    @override
    def copy(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        if state.numel():
            super().copy(layer, token, window, state)


@fault("general (activation='silu' is the default of vLLM's and SGLang's causal_conv1d_fn)", "matches-oracle")
class ActivationOfOtherLayers(ConvParent):
    """The convolution ends with silu, as in front of a recurrence, and not without an activation."""

    @override
    def convolved(self, every: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        return torch.nn.functional.silu(super().convolved(every, layer)).to(every.dtype).float()
