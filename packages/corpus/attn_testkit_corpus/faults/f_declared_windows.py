"""Class F: declared windows, and the behavior at the edge of the declaration."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardMode, refuse_undeclared

from .catalogue import fault
from .dense import DenseBackend

_ALL = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
WINDOWED = DenseBackend.capabilities.with_changes(
    heads={"families": {"gqa"}, "head_dims": {64}, "gqa_ratios": {2, 4}},
    precision={"dtypes": {"bf16"}},
    kv_pool={"kv_dtypes": {"same"}},
    options={"logit_cap": False, "sinks": False},
    bounds={"max_context_len": 1 << 14},
)


class ZeroIsNone(DenseBackend):
    """`if window > 0`: kernels of servers in which a window of 0 means no window."""

    @override
    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super().in_window(layer) if layer.sliding_window_size > 0 else self.visible


@fault(
    "general; sglang's extend kernel, in which a window of 0 means no window",
    "matches-oracle",
    "KV tokens before the window are visible|what it sees without a window",
    modes=_ALL,
)
class NarrowestWindowIsNone(DenseBackend):
    """Windows from 4 on are declared, but the kernel drops a window of 4, because it tests for more than 4."""

    capabilities = WINDOWED.with_changes(windows={"smallest": 4})

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super().in_window(layer) if layer.sliding_window_size > 4 else self.visible


@fault(
    "general; sglang's extend kernel, in which a window of 0 means no window",
    "refuses-undeclared",
    "a sliding window of size 0 is not declared|the constructor accepted it",
    modes=_ALL,
    executions="eager",
)
class NarrowerWindowThanDeclaredIsAccepted(ZeroIsNone):
    """A window of 0 is not declared, but a model with it is accepted and served without a window."""

    capabilities = WINDOWED.with_changes(windows={"smallest": 1})

    def __init__(self, context: BackendContext) -> None:
        refuse_undeclared(self.capabilities.with_changes(windows={"smallest": 0}), context)
        self.context, self.mask_buffer = context, None
        self.key = torch.arange(context.max_context_len, device=context.device)


class OneWindow(DenseBackend):
    """Windowed layers use the model's window, because one list of windowed keys is planned for all of them."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.window = self.model_window()

    def model_window(self) -> int:
        """W of the model; -1 for none."""
        return self.context.sliding_window_size

    @override
    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super().in_window(self.with_window(layer))

    def with_window(self, layer: AttentionLayer) -> AttentionLayer:
        """The layer with the model's window, if it has one."""
        return layer if layer.sliding_window_size < 0 else replace(layer, sliding_window_size=self.window)


@fault(
    "general; sglang's triton backend plans by the model's window",
    "matches-oracle",
    "the window of another layer",
    modes=_ALL,
    slug="widest-window-for-all-windowed-layers",
)
class WidestWindowForAll(OneWindow):
    """The plan uses one window per model, the widest, but windows that differ by layer are declared."""

    capabilities = WINDOWED

    def model_window(self) -> int:
        return max(layer.sliding_window_size for layer in self.context.layers)


@fault("general; vLLM #51756", "matches-oracle", "only layer", modes=_ALL)
class ModelWindowInFullLayers(OneWindow):
    """The window of the model is used in all layers, although layers without one are declared."""

    capabilities = WINDOWED.with_changes(windows={"layers": "one"})

    def with_window(self, layer: AttentionLayer) -> AttentionLayer:
        return replace(layer, sliding_window_size=self.window)


@fault("general", "refuses-undeclared", "layers with sliding windows", modes=_ALL, executions="eager")
class LayersThatDifferInWindowsAreAccepted(OneWindow):
    """The same window in all layers is declared, but a model in which some layers have none is accepted."""

    capabilities = WINDOWED.with_changes(windows={"layers": "same"})

    def __init__(self, context: BackendContext) -> None:
        refuse_undeclared(self.capabilities.with_changes(windows={"layers": "any"}), context)
        self.context, self.mask_buffer = context, None
        self.key = torch.arange(context.max_context_len, device=context.device)
        self.window = self.model_window()

    def with_window(self, layer: AttentionLayer) -> AttentionLayer:
        return replace(layer, sliding_window_size=self.window)


@fault(
    "tpu-inference #2755",
    "matches-oracle",
    "KV tokens before the window are visible",
    modes="decode extend",
    executions="eager",
    slug="windows-of-16-bit-positions",
)
class WindowsOf16BitPositions(DenseBackend):
    """Positions are compared in 16 bits in layers with a window: those from 32,768 on are negative."""

    capabilities = WINDOWED.with_changes(
        eager=(ForwardMode.DECODE, ForwardMode.EXTEND), graph=(), bounds={"max_context_len": 1 << 17}
    )

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        if layer.sliding_window_size < 0:
            return self.visible
        row, key = self.position.to(torch.int16).long(), self.key_position.to(torch.int16).long()
        return self.visible & (key >= (row - layer.sliding_window_size)[..., None])
