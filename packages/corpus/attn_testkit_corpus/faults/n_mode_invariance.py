"""Class N: equal bits that are declared for a row of decode or verify and the same row of extend."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .builds import ModeInvariantBackend, SplitsOfFixedTokensBackend
from .catalogue import fault
from .parent import Metadata

_EXTEND, _EAGER = (ForwardMode.EXTEND,), ("eager",)


@fault(
    slug="split-count-of-decode-by-its-batch",
    source="general; decode kernels split keys until a GPU is full, and prefill kernels do not split",
    modes=_EXTEND,
    executions=_EAGER,
    checks=("mode-invariant",),
    hint="in decode than the same rows",
)
class SplitCountOfDecodeByItsBatch(ModeInvariantBackend):
    """Decode has as many splits as its batch leaves room for, and extend has none."""

    @override
    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_decode = batch.forward_mode.is_decode()
        return super().plan(batch)

    @override
    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        splits = max(1, self.max_splits - len(lens) // 8) if self.is_decode else 1
        return (-(-lens // (splits * self.tile)) * self.tile).clamp(min=self.tile)


@fault(
    slug="other-kernel-for-verify",
    source="general; verify with a mask has a kernel of its own in most servers",
    modes=_EXTEND,
    executions=_EAGER,
    checks=("mode-invariant",),
    hint="in target-verify than the same rows",
)
class OtherKernelForVerify(ModeInvariantBackend):
    """The kernel of target-verify multiplies queries by the scale before the product, and the others after it."""

    @override
    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_verify = batch.forward_mode.is_target_verify()
        return super().plan(batch)

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        scale = 1.1 if self.is_verify else 1.0
        return super().logits(rows * scale, keys / scale, layer)


@fault(
    slug="split-count-by-bucket",
    source="general; FlashInfer's and FA3's planners choose splits by the padded batch of a graph",
    modes=_EXTEND,
    executions=_EAGER,
    checks=("mode-invariant",),
    hint="in a replay of decode in bucket",
)
class SplitCountByBucket(SplitsOfFixedTokensBackend):
    """A graph has splits of more tokens in small buckets. Eager mode has those of a fixed number."""

    @override
    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        chunk = super().plan_splits(lens)
        return chunk * 2 if self.in_graph and len(lens) < 4 else chunk


@fault(
    slug="split-count-by-longest-request-of-capture",
    source="general; max_seq_len is a number of the host, which a graph keeps from its capture",
    modes=_EXTEND,
    executions=_EAGER,
    checks=("mode-invariant",),
    hint="in a replay of decode in bucket",
)
class SplitCountByLongestRequestOfCapture(SplitsOfFixedTokensBackend):
    """Splits hold as many tokens as the longest request of the table may have, which the capture does not know better;
    an eager plan knows the lengths."""

    @override
    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        chunk = super().plan_splits(lens)
        return torch.full_like(chunk, self.pages * self.context.page_size) if self.in_graph else chunk


@fault(
    slug="tile-by-bucket",
    source="general; a tile of rows or channels that is tuned by batch size, as in vLLM's unified attention",
    modes=_EXTEND,
    executions=_EAGER,
    checks=("mode-invariant",),
    hint="in a replay of (decode|target-verify) in bucket",
)
class TileByBucket(SplitsOfFixedTokensBackend):
    """Graphs of more than two requests sum a product of q and k in two halves of the head dim."""

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if not self.in_graph or len(self.bucket_lens) <= 2 or layer.logit_cap:
            return super().logits(rows, keys, layer)
        half = rows.shape[-1] // 2
        one = super().logits(rows[..., :half], keys[..., :half], layer)
        return one + super().logits(rows[..., half:], keys[..., half:], layer)

    @override
    def plan(self, batch: ForwardBatch) -> Metadata:
        found = super().plan(batch)
        self.bucket_lens = found.kv_lens
        return found


@fault(
    slug="other-kernel-for-verify-in-graphs",
    source="general; a verify in a graph takes the kernel with a mask, an eager one that of prefills",
    modes=_EXTEND,
    executions=_EAGER,
    checks=("mode-invariant",),
    hint="in a replay of target-verify in bucket",
)
class OtherKernelForVerifyInGraphs(SplitsOfFixedTokensBackend):
    """The kernel that graphs of target-verify record multiplies queries by the scale before the product."""

    @override
    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_verify = batch.forward_mode.is_target_verify()
        return super().plan(batch)

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        scale = 1.1 if self.is_verify and self.in_graph else 1.0
        return super().logits(rows * scale, keys / scale, layer)
