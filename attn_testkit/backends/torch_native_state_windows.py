"""``torch_native_state`` over pools whose windows have more columns than the taps of a convolution read."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import ForwardMode, HeadShapes, State, StateInput
from ..contract.state import CONTINUES, CONV_WINDOWS
from .torch_native_state import TorchNativeStateBackend


class TorchNativeStateWindowsBackend(TorchNativeStateBackend):
    """GDN, KDA and Mamba2 in decode and extend. It is declared for few values, so that options meet longer windows."""

    capabilities = TorchNativeStateBackend.capabilities.with_changes(
        eager={ForwardMode.DECODE, ForwardMode.EXTEND},
        graph={ForwardMode.DECODE},
        bounds={"max_topk": 0},
        heads=HeadShapes(families={"gdn", "kda", "mamba"}, gqa_ratios={2}, head_dims={32}),
        precision={"dtypes": {"bf16"}},
        state=State(
            k_dims={32},
            conv_widths={2, 4},
            conv_windows=frozenset(CONV_WINDOWS),
            fresh={"flag", "zeroed"},
            strided=True,
            snapshots={16},
            continues=frozenset(CONTINUES),
        ),
    )

    @override
    def windows(self, held: torch.Tensor, state: StateInput, columns: int) -> torch.Tensor:
        """Columns of each request that a step moves: those that taps read, or all if the newest is the last."""
        return held if self.states.conv_windows == "newest_last" else super().windows(held, state, columns)
