"""Class N: equal bits that are declared for a row of decode or verify and the same row of extend."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .builds import ModeInvariantBackend, SplitsOfFixedTokensBackend
from .catalogue import fault
from .orders import in_other_order
from .parent import Metadata

_EXTEND, _EAGER = (ForwardMode.EXTEND,), ("eager",)
_ITS_ORDER = "the other kernel adds backwards three numbers whose sum depends on the order"


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
    def own_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return self.in_splits(lens, 1)

    @override
    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return self.in_splits(lens, max(1, self.max_splits - len(lens) // 8) if self.is_decode else 1)

    def in_splits(self, lens: torch.Tensor, splits: int) -> torch.Tensor:
        """[B] int32: keys in one of so many splits, whole tiles."""
        return (-(-lens // (splits * self.tile)) * self.tile).clamp(min=self.tile)


@fault(
    slug="other-kernel-for-verify",
    source="general; verify with a mask has a kernel of its own in most servers",
    modes=_EXTEND,
    executions=_EAGER,
    checks=("mode-invariant",),
    hint="in target-verify than the same rows",
    modelled=_ITS_ORDER,
)
class OtherKernelForVerify(ModeInvariantBackend):
    """The kernel of target-verify adds in another order than that of the other modes."""

    @override
    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_verify = batch.forward_mode.is_target_verify()
        return super().plan(batch)

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return in_other_order(super().attend(q, layer, meta), self.is_verify)


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
    modelled=_ITS_ORDER,
)
class TileByBucket(SplitsOfFixedTokensBackend):
    """Graphs of more than two requests sum a product of q and k in two halves of the head dim."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return in_other_order(super().attend(q, layer, meta), self.in_graph and len(meta.kv_lens) > 2)


@fault(
    slug="other-kernel-for-verify-in-graphs",
    source="general; a verify in a graph takes the kernel with a mask, an eager one that of prefills",
    modes=_EXTEND,
    executions=_EAGER,
    checks=("mode-invariant",),
    hint="in a replay of target-verify in bucket",
    modelled=_ITS_ORDER,
)
class OtherKernelForVerifyInGraphs(SplitsOfFixedTokensBackend):
    """The kernel that graphs of target-verify record adds in another order than the eager one."""

    @override
    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_verify = batch.forward_mode.is_target_verify()
        return super().plan(batch)

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return in_other_order(super().attend(q, layer, meta), self.is_verify and self.in_graph)
