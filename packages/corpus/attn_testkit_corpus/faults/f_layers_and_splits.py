"""Class F: windows of several layers, and windows with other options: splits, long requests, shared prefixes."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer

from .builds import CascadeBackend
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_LONG = 1024
"""Number of keys above which a request uses the second path."""


@fault("vLLM (FlashInfer's one set of parameters for all layers); sglang (two wrappers)", "matches-oracle", "window")
class WindowOfFirstWindowedLayer(PlannedBackend):
    """One wrapper serves all windowed layers, and it is planned with the window of the first of them."""

    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        first = next(other for other in self.context.layers if other.sliding_window_size >= 0)
        return position - first.sliding_window_size


@fault(
    "litgpt #1972, #1995",
    "matches-oracle",
    "window",
    modelled="upstream the period is six, here the global layer comes first",
)
class WindowsTakenToAlternate(PlannedBackend):
    """Even-numbered layers are assumed to be windowed, as in the model for which the code was written."""

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        widest = max(other.sliding_window_size for other in self.context.layers)
        window = layer.sliding_window_size if layer.sliding_window_size >= 0 else widest
        layer = replace(layer, sliding_window_size=-1 if layer.layer_id % 2 else window)
        return super().visible(meta, layer, position)


@fault("vllm-xpu-kernels #168 (review)", "matches-oracle", "missing", modes="draft-extend draft-extend-v2")
class WindowSplitsForOneRow(PlannedBackend):
    """Splits of a windowed layer hold W + 1 keys in total, the window of one row, but a step has several rows."""

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


@fault("sgl-kernel-xpu #491; flash-attention 2.6", "matches-oracle", "KV tokens before the window are visible")
class LongPathWithoutWindow(PlannedBackend):
    """Requests of more than 1024 keys use the path with split keys, to which the window is not passed."""

    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        assert self.metadata is not None
        return torch.where(self.metadata.kv_lens[:, None] > _LONG, 0, super().window_start(position, layer))


@fault(
    "flashinfer #3682, #3578",
    "matches-oracle",
    "nothing computed them|missing",
    modes="extend",
    modelled="keys after the 256th are left out, where the kernel waited for them forever",
)
class SwaFp8ConsumerStopsEarly(PlannedBackend):
    """The FP8 kernel of windowed layers leaves its loop without the stages that were loaded ahead: two of 128 keys."""

    capabilities = PlannedBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_e4m3"}})

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        seen = super().visible(meta, layer, position)
        return seen if layer.sliding_window_size < 0 else seen & (self.index[: seen.shape[-1]] < 256)


@fault("vLLM #11635, #55227", "matches-oracle", "KV tokens before the window are visible")
class SharedPrefixWithoutWindow(CascadeBackend):
    """The prefix that all requests share is attended to once for all of them, and the window is not passed on."""

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        return super().visible(meta, layer, position) | (
            self.index[: self.pages * self.context.page_size] < self.common
        )
