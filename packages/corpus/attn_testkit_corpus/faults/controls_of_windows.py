"""Healthy controls of declared windows."""

from __future__ import annotations

from dataclasses import replace

from attn_testkit.contract import AttentionLayer

from .catalogue import control
from .f_declared_windows import WINDOWED, OneWindow, ZeroIsNone
from .f_local_chunks import ChunkedBackend


@control()
class WindowOfZeroIsNone(ZeroIsNone):
    """A window of 0 counts as no window, and windows from 1 on are declared (sglang)."""

    capabilities = WINDOWED.with_changes(windows={"smallest": 1})


@control()
class OneWindowOfAModel(OneWindow):
    """Windowed keys are planned once, by the window of the model; other layers are full (sglang's triton)."""

    capabilities = WINDOWED.with_changes(windows={"layers": "one"})


@control()
class SameWindowInAllLayers(OneWindow):
    """All layers use the model's window (vLLM without hybrid KV groups)."""

    capabilities = WINDOWED.with_changes(windows={"layers": "same"})

    def with_window(self, layer: AttentionLayer) -> AttentionLayer:
        return replace(layer, sliding_window_size=self.window)


@control()
class ChunkedLocalLayers(ChunkedBackend):
    """Rows of every second layer see the keys of their own chunk (Llama 4)."""
