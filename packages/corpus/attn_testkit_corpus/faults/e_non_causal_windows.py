"""Class E: windows of layers that are not causal, with another meaning than the layer's."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import NON_CAUSAL_WINDOWS, AttentionLayer

from .catalogue import fault
from .e_non_causal import NON_CAUSAL, BlockBackend


class WindowedBlockBackend(BlockBackend):
    """Healthy parent: a window of layers that are not causal leaves the keys that ``non_causal_window`` says."""

    capabilities = NON_CAUSAL.with_changes(windows={"non_causal": NON_CAUSAL_WINDOWS})

    @override
    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        if layer.sliding_window_size < 0 or layer.causal:
            return super().in_window(layer)
        return self.visible & self.near(layer.sliding_window_size, layer.non_causal_window)

    def near(self, window: int, meaning: str) -> torch.Tensor:
        """[B, W, C] bool: keys that a window of layers that are not causal leaves to each row."""
        before = self.position[..., None] - self.key_position
        if meaning == "block":
            before = before[:, :1]
        return (before.abs() if meaning == "both" else before) <= window


@fault(
    "sglang #39300, #33603",
    "matches-oracle",
    "KV tokens before the window are visible|sliding_window_size does not reach the kernel|right without a window",
    modes="target-verify extend",
)
class WindowOnlyIfCausal(WindowedBlockBackend):
    """The window is applied in the branch for causal layers only, so layers of an encoder see everything."""

    def near(self, window: int, meaning: str) -> torch.Tensor:
        return torch.ones_like(self.visible)


@fault(
    "vLLM #31406",
    "matches-oracle",
    "in layers that are not causal a window",
    modes="target-verify extend",
)
class WindowOfLaterKeysOnly(WindowedBlockBackend):
    """The window of layers that are not causal begins at the row: row p sees keys p .. p + W."""

    def near(self, window: int, meaning: str) -> torch.Tensor:
        later = self.key_position - self.position[..., None]
        return (later >= 0) & (later <= window) if meaning == "both" else super().near(window, meaning)


@fault(
    "TensorRT-LLM #17935",
    "matches-oracle",
    "the mask is causal|in layers that are not causal a window",
    modes="target-verify extend",
)
class WindowEndsAtTheRow(WindowedBlockBackend):
    """The kernel gets (W, 0) for a window whatever ``causal`` says, which hides all later keys."""

    def near(self, window: int, meaning: str) -> torch.Tensor:
        before = self.position[..., None] - self.key_position
        return (before >= 0) & (before <= window)


@fault(
    "sglang #35208",
    "matches-oracle",
    "in layers that are not causal a window",
    modes="target-verify",
)
class WindowOfTheBlock(WindowedBlockBackend):
    """Lists of keys begin W before the block's first row, and the kernel does not narrow them for later rows."""

    def near(self, window: int, meaning: str) -> torch.Tensor:
        return super().near(window, "block" if meaning == "left" else meaning)
