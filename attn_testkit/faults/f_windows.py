"""Class F: sliding windows: which end is cut, from where it is counted, and on which layer."""

from __future__ import annotations

import torch

from ..backends.torch_native import TorchNativeBackend
from ..contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode
from .catalogue import fault

_ALL = tuple(ForwardMode)
_EXTENDS = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
_CAUSAL = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
_Visibility = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Windowed(TorchNativeBackend):
    """Healthy: the lower end of the window, in a method of its own."""

    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        if layer.sliding_window_size < 0:
            return self._visible
        return self._visible & (self._key_position >= self._first(layer.sliding_window_size)[..., None])

    def _first(self, window: int) -> torch.Tensor:
        """[B, W]: the oldest position that a row may see."""
        return self._position - window


@fault(
    slug="swa-decode-window-vs-window-plus-one",
    bug_class="F",
    source="sglang #32087, MUTATION_FIXES.md M5",
    modes=(ForwardMode.DECODE,),
    mechanism="W is a radius with both ends inside, and the decode gather keeps W keys instead of W + 1",
    promises=("matches-oracle",),
    hint="the first KV token is missing|a window that is nowhere in the request",
)
class DecodeWindowOneShort(_Windowed):
    def _first(self, window: int) -> torch.Tensor:
        return self._position - window + 1


@fault(
    slug="swa-right-side-open",
    bug_class="F",
    source="lightllm #1311",
    modes=_CAUSAL,
    mechanism="the window is passed as (W, W) instead of (W, 0), and with a window the kernel applies no causal mask",
    promises=("matches-oracle",),
    hint="later tokens are visible",
)
class WindowRightSideOpen(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        self._alive = self._key < self._kv_lens(batch, counts)[:, None, None]
        return super()._visibility(batch, counts, offset)

    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        if layer.sliding_window_size < 0:
            return self._visible
        return self._alive & ((self._position[..., None] - self._key_position).abs() <= layer.sliding_window_size)


@fault(
    slug="swa-window-given-at-run-not-plan",
    bug_class="F",
    source="sglang #31501",
    modes=_ALL,
    mechanism="the module was planned without a window, so the run-time value trims whole tiles of 16 keys and no "
    "single key",
    promises=("matches-oracle",),
    hint="KV tokens before the window are visible",
)
class WindowTrimsWholeTiles(_Windowed):
    def _first(self, window: int) -> torch.Tensor:
        return (self._position - window).clamp(min=0) // 16 * 16


@fault(
    slug="swa-window-taken-from-group",
    bug_class="F",
    source="vLLM #51756",
    modes=_ALL,
    mechanism="layers of one KV-cache group share the group's window, and the global layer gets the windowed one's",
    promises=("matches-oracle",),
    hint="only layer 1",
)
class WindowTakenFromGroup(TorchNativeBackend):
    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super()._in_window(self.context.layers[0])


@fault(
    slug="local-attn-token-table-with-pages",
    bug_class="F",
    source="sglang #32902",
    modes=_ALL,
    mechanism="windowed layers get a table of token slots and read it as a table of pages",
    promises=("reads-own-kv", "matches-oracle"),
    hint="layer 0",
    modelled="a sliding window stands in for chunked-local attention",
)
class WindowTokenTableWithPages(TorchNativeBackend):
    def _keys(self, layer: AttentionLayer) -> torch.Tensor:
        own, page = self._slots, self.context.page_size
        if layer.sliding_window_size >= 0:
            pages = own[:, self._key // page]
            self._slots = (pages * page + self._key % page) % self.context.kv_pool.num_slots
        keys = super()._keys(layer)
        self._slots = own
        return keys


@fault(
    slug="window-normalised-on-one-side-only",
    bug_class="F",
    source="aiter #2170",
    modes=(ForwardMode.DECODE,),
    mechanism="a window beyond the longest context counts as none when the kernel is chosen, and as one when the "
    "module is",
    promises=("completes",),
    hint="module",
)
class WindowNormalisedOnOneSide(TorchNativeBackend):
    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        module = "windowed" if layer.sliding_window_size >= 0 else "plain"
        kernel = "windowed" if 0 <= layer.sliding_window_size < self.context.max_context_len else "plain"
        if module != kernel:
            raise RuntimeError(f"kernel {kernel} was not built into module {module}")
        return super()._in_window(layer)


@fault(
    slug="swa-decode-one-key-more",
    bug_class="F",
    source="general",
    modes=(ForwardMode.DECODE,),
    mechanism="the decode window starts at seq_len - W - 2: one key more than the layer's window",
    promises=("matches-oracle",),
    hint="KV tokens before the window are visible",
)
class DecodeWindowOneMore(_Windowed):
    def _first(self, window: int) -> torch.Tensor:
        return self._position - window - 1


@fault(
    slug="swa-zero-means-none",
    bug_class="F",
    source="general",
    modes=_ALL,
    mechanism="`if window > 0`: a window of 0, which is the key of the row alone, counts as no window",
    promises=("matches-oracle",),
    hint="KV tokens before the window are visible",
)
class WindowZeroMeansNone(TorchNativeBackend):
    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super()._in_window(layer) if layer.sliding_window_size > 0 else self._visible


@fault(
    slug="swa-ignored-in-verify",
    bug_class="F",
    source="sglang #29858",
    modes=_EXTENDS,
    mechanism="only decode passes the window on",
    promises=("matches-oracle",),
    hint="KV tokens before the window are visible",
)
class WindowIgnoredInExtends(TorchNativeBackend):
    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super()._in_window(layer) if self._position.shape[1] == 1 else self._visible


@fault(
    slug="swa-counted-from-the-last-row",
    bug_class="F",
    source="general",
    modes=_EXTENDS,
    mechanism="all rows of a request get the window of its last row",
    promises=("matches-oracle", "finite"),
    hint="window",
)
class WindowCountedFromTheLastRow(_Windowed):
    def _first(self, window: int) -> torch.Tensor:
        return self._position.amax(1, keepdim=True).expand_as(self._position) - window


@fault(
    slug="swa-counted-from-the-prefix",
    bug_class="F",
    source="general",
    modes=(ForwardMode.TARGET_VERIFY,),
    mechanism="seq_lens of verify is the prefix, and the window is cut from it as if it were the whole length",
    promises=("matches-oracle",),
    hint="KV tokens before the window are visible",
)
class WindowCountedFromThePrefix(_Windowed):
    def _first(self, window: int) -> torch.Tensor:
        return self._position[:, :1].expand_as(self._position) - window


@fault(
    slug="swa-of-first-windowed-layer-cached",
    bug_class="F",
    source="general",
    modes=_ALL,
    mechanism="the visibility of the windowed layer is written back, and the layers behind it keep it",
    promises=("matches-oracle",),
    hint="only layer 1",
)
class WindowWrittenBack(TorchNativeBackend):
    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        self._visible = super()._in_window(layer)
        return self._visible


@fault(
    slug="swa-page-table-starts-at-window-page",
    bug_class="F",
    source="general",
    modes=(ForwardMode.DECODE,),
    mechanism="pages before the window are left out of the table, and keys are still counted from the first page",
    promises=("reads-own-kv", "matches-oracle"),
    hint="layer 0",
)
class WindowTableStartsLate(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._all = torch.arange(context.max_context_len, device=context.device)

    def _keys(self, layer: AttentionLayer) -> torch.Tensor:
        own, page = self._slots, self.context.page_size
        if layer.sliding_window_size >= 0:
            skipped = (self._position[:, :1] - layer.sliding_window_size).clamp(min=0) // page * page
            self._slots = own.gather(1, (self._all + skipped).clamp(max=own.shape[1] - 1))
        keys = super()._keys(layer)
        self._slots = own
        return keys
