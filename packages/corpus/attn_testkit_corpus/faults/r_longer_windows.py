"""Class R: windows of a convolution with more columns than its taps read."""

from __future__ import annotations

import torch

from attn_testkit.contract import StateLayer

from .catalogue import fault
from .longer_windows import LongerWindowsParent


@fault(
    "general (vLLM's Triton kernels read the first W - 1 columns, Dao-AILab's the last)",
    "conv-window-exact finite",
    "columns of its longer window that hold no input",
    modes="decode extend",
)
class TapsFromTheOtherEnd(LongerWindowsParent):
    """The taps read the last columns of a window whose inputs are in the first ones, or the other way around."""

    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        window, state = super().before(layer)
        columns = layer.conv_width - 1
        if self.newest_is_last:
            taps = torch.cat([window[..., :-columns], window[..., :columns]], -1)
            return taps, state
        held = self.states.pool.conv(layer.layer_id)[..., -columns:]
        return self.loaded(held, self.index, self.begun), state


@fault(
    "general (state_len of the tensor in place of width - 1)",
    "conv-window-exact",
    "only the first 3 columns move",
    modes="decode extend",
)
class WritesColumnsAfterTheTaps(LongerWindowsParent):
    """The last inputs are also stored in the columns after those that taps read, as if a draft had been there."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        super().store(pool, rows, index)
        if pool.dim() == 3 and not self.newest_is_last:
            more = pool.stride(1) - pool.shape[-1]
            beyond = pool.as_strided((*pool.shape[:2], more), pool.stride(), pool.storage_offset() + pool.shape[-1])
            super().store(beyond, rows[..., -1:].expand(-1, -1, more), index)


@fault(
    "general (a kernel of W - 1 columns over a window of W, as Mamba of state-spaces has it)",
    "conv-window-exact",
    "moves by all of its columns",
    modes="decode extend",
)
class MovesTheTapsOnly(LongerWindowsParent):
    """Moves only the W - 1 columns that taps read, of a window whose newest column is the last."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        taps = 3 if pool.dim() == 3 and self.newest_is_last else 0
        super().store(pool[..., -taps:], rows[..., -taps:], index)


@fault("general (F.pad(x, (columns - len, 0)) forgotten)", "conv-window-exact", modes="extend")
class ShortPromptLeavesOldColumns(LongerWindowsParent):
    """A fresh prompt that is shorter than the window leaves what the slot held in the columns before its rows."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        if pool.dim() == 3 and self.newest_is_last:
            columns = torch.arange(pool.shape[-1], device=pool.device)
            stale = (columns < pool.shape[-1] - self.counts[:, None]) & ~self.begun[:, None]
            rows = torch.where(stale[:, None], pool[index], rows)
        super().store(pool, rows, index)
