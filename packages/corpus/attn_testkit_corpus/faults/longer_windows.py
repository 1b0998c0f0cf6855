"""The healthy parent of faults over pools whose windows have more columns than taps read."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import ForwardMode, StateLayer

from .states import StateParent
from .states_of_servers import SnapshotsParent


class LongerWindowsParent(SnapshotsParent):
    """A right backend that moves the first W - 1 columns of a window, or all columns if the newest is the last."""

    capabilities = StateParent.capabilities.with_changes(
        eager={ForwardMode.DECODE, ForwardMode.EXTEND},
        graph={ForwardMode.DECODE},
        bounds={"max_topk": 0},
        state=replace(
            StateParent.declared_state(), conv_windows={"taps_first", "newest_last"}, fresh={"flag", "zeroed"},
            snapshots={16},
        ),
    )  # fmt: skip

    @property
    def newest_is_last(self) -> bool:
        """True if all columns of a window are inputs."""
        return self.states.conv_windows == "newest_last"

    @override
    def pools(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        conv, temporal = super().pools(layer)
        return self.moved(conv, layer.conv_width - 1), temporal

    def moved(self, windows: torch.Tensor, columns: int) -> torch.Tensor:
        """The columns of windows [slots, C, all columns] that a step moves. ``columns``: W - 1."""
        return windows if self.newest_is_last else windows[..., :columns]

    @override
    def convolved(self, every: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        return super().convolved(self.taps(every, layer.conv_width), layer)

    def taps(self, every: torch.Tensor, width: int) -> torch.Tensor:
        """The last W inputs [bs, C, W] of a window and the row after it [bs, C, columns + 1]. ``width``: W."""
        return every[..., -width:]
