"""Healthy controls of declared windows."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from attn_testkit.contract import AttentionLayer

from .catalogue import control
from .f_declared_windows import WINDOWED, OneWindow, ZeroIsNone
from .f_local_chunks import ChunkedBackend


@control("window-of-zero-is-none")
class WindowOfZeroIsNone(ZeroIsNone):
    """A window of 0 counts as no window, and windows from 1 on are declared (sglang)."""

    capabilities = WINDOWED.with_changes(windows={"smallest": 1})


@control("one-window-of-a-model")
class OneWindowOfAModel(OneWindow):
    """Windowed keys are planned once, by the window of the model; other layers are full (sglang's triton)."""

    capabilities = WINDOWED.with_changes(windows={"layers": "one"})


@control("same-window-in-all-layers")
class SameWindowInAllLayers(OneWindow):
    """All layers use the model's window (vLLM without hybrid KV groups)."""

    capabilities = WINDOWED.with_changes(windows={"layers": "same"})

    @override
    def with_window(self, layer: AttentionLayer) -> AttentionLayer:
        return replace(layer, sliding_window_size=self.window)


@control("chunked-local-layers")
class ChunkedLocalLayers(ChunkedBackend):
    """Rows of every second layer see the keys of their own chunk (Llama 4)."""
