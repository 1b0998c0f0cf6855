"""Class F: windows of several layers, and windows beside other options: splits, long requests, a soft cap."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..backends.torch_native import TorchNativeBackend
from ..contract import AttentionLayer, ForwardBatch, ForwardMode
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = tuple(ForwardMode)
_CAUSAL = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
_LONG = 1024
"""Keys from which a request takes the other path."""


@fault(
    slug="window-of-first-windowed-layer",
    bug_class="F",
    source="vLLM (FlashInfer's one set of parameters for all layers); sglang (two wrappers)",
    modes=_ALL,
    mechanism="one wrapper serves all windowed layers, and it is planned with the window of the first of them",
    promises=("matches-oracle",),
    hint="window",
)
class WindowOfFirstWindowedLayer(PlannedBackend):
    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        first = next(other for other in self.context.layers if other.sliding_window_size >= 0)
        return position - first.sliding_window_size


@fault(
    slug="windows-taken-to-alternate",
    bug_class="F",
    source="litgpt #1972, #1995",
    modes=_ALL,
    mechanism="layers of even number are taken for the windowed ones, as in the model that the code was written for",
    promises=("matches-oracle",),
    hint="window",
    modelled="upstream the period is six, here the global layer comes first",
)
class WindowsTakenToAlternate(PlannedBackend):
    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        widest = max(other.sliding_window_size for other in self.context.layers)
        window = layer.sliding_window_size if layer.sliding_window_size >= 0 else widest
        layer = replace(layer, sliding_window_size=-1 if layer.layer_id % 2 else window)
        return super().visible(meta, layer, position)


@fault(
    slug="window-splits-for-one-row",
    bug_class="F",
    source="vllm-xpu-kernels #168 (review)",
    modes=_CAUSAL,
    mechanism="splits of a windowed layer hold W + 1 keys in sum, which is the window of one row; a step has several",
    promises=("matches-oracle",),
    hint="missing",
)
class WindowSplitsForOneRow(PlannedBackend):
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        self.window = layer.sliding_window_size
        return super().attend(q, layer, meta)

    def in_split(self, meta: Metadata) -> torch.Tensor:
        if self.window < 0:
            return super().in_split(meta)
        lens = meta.kv_lens.long()[:, None]
        first = (lens - meta.cu_seqlens_q.diff()[:, None] - self.window).clamp(min=0)
        keys, step = lens.clamp(max=self.window + 1), self.max_splits * self.tile
        chunk = ((keys + step - 1) // step * self.tile).clamp(min=1)
        offset = self.index[: self.pages * self.context.page_size] - first
        split = torch.where(offset >= 0, offset // chunk, -1)
        return split[:, None] == self.index[: self.max_splits, None]


@fault(
    slug="long-path-without-window",
    bug_class="F",
    source="sgl-kernel-xpu #491; flash-attention 2.6",
    modes=_ALL,
    mechanism="requests of more than 1024 keys take the path of split keys, to which the window is not passed",
    promises=("matches-oracle",),
    hint="KV tokens before the window are visible",
)
class LongPathWithoutWindow(PlannedBackend):
    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        assert self.metadata is not None
        return torch.where(self.metadata.kv_lens[:, None] > _LONG, 0, super().window_start(position, layer))


class _LongPath(TorchNativeBackend):
    """Healthy: knows which requests are long."""

    def _kv_lens(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        lens = super()._kv_lens(batch, counts)
        self._long = (lens > _LONG)[:, None, None, None, None]
        return lens


@fault(
    slug="long-path-without-soft-cap",
    bug_class="G",
    source="flash-attention 2.6; sgl-kernel-xpu #491",
    modes=_ALL,
    mechanism="requests of more than 1024 keys take the path of split keys, which was built without the soft cap",
    promises=("matches-oracle",),
    hint="soft cap",
)
class LongPathWithoutSoftCap(_LongPath):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        plain = super()._logits(rows, keys, replace(layer, logit_cap=0.0))
        return torch.where(self._long, plain, super()._logits(rows, keys, layer))


@fault(
    slug="long-path-without-sinks",
    bug_class="G",
    source="sgl-kernel-xpu #491",
    modes=_ALL,
    mechanism="requests of more than 1024 keys take the path of split keys, whose combine knows no sinks",
    promises=("matches-oracle",),
    hint="sinks",
)
class LongPathWithoutSinks(_LongPath):
    def _weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        plain = super()._weights(logits, seen, replace(layer, sinks=None))
        return torch.where(self._long, plain, super()._weights(logits, seen, layer))


@fault(
    slug="soft-cap-lost-on-windowed-layers",
    bug_class="G",
    source="general; models with a window and a soft cap in one layer (Gemma 2)",
    modes=_ALL,
    mechanism="the kernel is chosen by the window alone, and the windowed one was built without a soft cap",
    promises=("matches-oracle",),
    hint="soft cap",
)
class SoftCapLostOnWindowedLayers(TorchNativeBackend):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super()._logits(rows, keys, replace(layer, logit_cap=0.0) if layer.sliding_window_size >= 0 else layer)
