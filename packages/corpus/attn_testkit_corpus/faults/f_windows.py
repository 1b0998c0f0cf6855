"""Class F: sliding windows with a wrong end, a wrong origin, or those of a wrong layer."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardMode

from .catalogue import fault
from .dense import DenseBackend

_EXTENDS = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)


@fault(
    "sglang #32087, MUTATION_FIXES.md M5",
    "matches-oracle",
    "the first KV token is missing|window probably covers no KV token of the request",
    modes="decode",
    slug="swa-decode-window-vs-window-plus-one",
)
class DecodeWindowOneShort(DenseBackend):
    """W is a radius with both ends inside, and the decode gather keeps W keys instead of W + 1."""

    def window_start(self, layer: AttentionLayer) -> torch.Tensor:
        return super().window_start(layer) + 1


@fault(
    "lightllm #1311",
    "matches-oracle",
    "later tokens are visible",
    modes="draft-extend draft-extend-v2",
    slug="swa-right-side-open",
)
class WindowRightSideOpen(DenseBackend):
    """The window is passed as (W, W) instead of (W, 0), and with a window the kernel applies no causal mask."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        if layer.sliding_window_size < 0:
            return self.visible
        alive = self.key < self.kv_lens[:, None, None]
        return alive & ((self.position[..., None] - self.key_position).abs() <= layer.sliding_window_size)


@fault(
    "sglang #31501",
    "matches-oracle",
    "KV tokens before the window are visible",
    slug="swa-window-given-at-run-not-plan",
)
class WindowTrimsWholeTiles(DenseBackend):
    """The module was planned without a window, so the run-time value trims whole tiles of 16 keys and no single key."""

    def window_start(self, layer: AttentionLayer) -> torch.Tensor:
        return super().window_start(layer).clamp(min=0) // 16 * 16


@fault("vLLM #51756", "matches-oracle", "only layer 1", slug="swa-window-taken-from-group")
class WindowTakenFromGroup(DenseBackend):
    """Layers of one KV-cache group share the group's window, and the global layer gets the windowed one's."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super().in_window(self.context.layers[0])


@fault(
    "sglang #32902",
    "reads-own-kv matches-oracle",
    "layer 0",
    slug="local-attn-token-table-with-pages",
    modelled="a sliding window takes the place of chunked-local attention",
)
class WindowTokenTableWithPages(DenseBackend):
    """Windowed layers get a table of token slots and read it as a table of pages."""

    def keys(self, layer: AttentionLayer) -> torch.Tensor:
        own, page = self.slots, self.context.page_size
        if layer.sliding_window_size >= 0:
            pages = own[:, self.key // page]
            self.slots = (pages * page + self.key % page) % self.context.kv_pool.num_slots
        keys = super().keys(layer)
        self.slots = own
        return keys


@fault("aiter #2170", "completes", "module", modes="decode", slug="window-normalised-on-one-side-only")
class WindowNormalisedOnOneSide(DenseBackend):
    """A window beyond the longest context counts as no window when the kernel is chosen, but as a window when the
    module is."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        module = "windowed" if layer.sliding_window_size >= 0 else "plain"
        kernel = "windowed" if 0 <= layer.sliding_window_size < self.context.max_context_len else "plain"
        if module != kernel:
            raise RuntimeError(f"kernel {kernel} was not built into module {module}")
        return super().in_window(layer)


@fault(
    "general",
    "matches-oracle",
    "one KV token before the window",
    modes="decode",
    slug="swa-decode-one-key-more",
)
class DecodeWindowOneMore(DenseBackend):
    """The decode window starts at seq_len - W - 2: one key more than the layer's window."""

    def window_start(self, layer: AttentionLayer) -> torch.Tensor:
        return super().window_start(layer) - 1


@fault("general", "matches-oracle", "KV tokens before the window are visible", slug="swa-zero-means-none")
class WindowZeroMeansNone(DenseBackend):
    """`if window > 0`: a window of 0, which leaves only the row's own key, counts as no window."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super().in_window(layer) if layer.sliding_window_size > 0 else self.visible


@fault(
    "sglang #29858",
    "matches-oracle",
    "KV tokens before the window are visible",
    modes=_EXTENDS,
    slug="swa-ignored-in-verify",
)
class WindowIgnoredInExtends(DenseBackend):
    """Only decode passes the window on."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super().in_window(layer) if self.position.shape[1] == 1 else self.visible


@fault("general", "matches-oracle finite", "window", modes=_EXTENDS, slug="swa-counted-from-the-last-row")
class WindowCountedFromTheLastRow(DenseBackend):
    """All rows of a request get the window of its last row."""

    def window_start(self, layer: AttentionLayer) -> torch.Tensor:
        return self.position.amax(1, keepdim=True).expand_as(self.position) - layer.sliding_window_size


@fault(
    "general",
    "matches-oracle",
    "one KV token before the window",
    modes="target-verify",
    slug="swa-counted-from-the-prefix",
)
class WindowCountedFromThePrefix(DenseBackend):
    """seq_lens of verify is the prefix, and the window is cut from it as if it were the whole length."""

    def window_start(self, layer: AttentionLayer) -> torch.Tensor:
        return self.position[:, :1].expand_as(self.position) - layer.sliding_window_size


@fault(
    "flashinfer #3864",
    "matches-oracle",
    "window",
    modes="target-verify",
    slug="swa-ignored-by-the-last-of-eight-rows",
    modelled="upstream one head is wrong, too, and the thread does not say why",
)
class WindowIgnoredByTheLastOfEightRows(DenseBackend):
    """A kernel for 8 rows over an FP8 pool has no window in the last row, at one in four lengths."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        inside = super().in_window(layer)
        if self.position.shape[1] != 8 or self.context.kv_pool.dtype != torch.float8_e4m3fn:
            return inside
        last = torch.arange(8, device=inside.device) == 7
        hit = last & (self.position[:, :1] % 4 == 2)
        return torch.where(hit[..., None], self.visible, inside)


@fault(
    "general", "matches-oracle", "only layer 1|the window of another layer", slug="swa-of-first-windowed-layer-cached"
)
class WindowWrittenBack(DenseBackend):
    """The visibility mask of the windowed layer is written back, so the layers after it use this mask, too."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        self.visible = super().in_window(layer)
        return self.visible


@fault(
    "general",
    "reads-own-kv matches-oracle",
    "with a sliding window is wrong",
    modes="decode",
    slug="swa-page-table-starts-at-window-page",
)
class WindowTableStartsLate(DenseBackend):
    """Pages before the window are left out of the table, but keys are still counted from the first page."""

    def keys(self, layer: AttentionLayer) -> torch.Tensor:
        own, page = self.slots, self.context.page_size
        if layer.sliding_window_size >= 0:
            skipped = (self.position[:, :1] - layer.sliding_window_size).clamp(min=0) // page * page
            self.slots = own.gather(1, (self.key + skipped).clamp(max=own.shape[1] - 1))
        keys = super().keys(layer)
        self.slots = own
        return keys
