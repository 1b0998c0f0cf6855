"""Class N: declared equal bits that are missing between a row of decode or verify and the same row of extend."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .builds import ModeInvariantBackend, SplitsOfFixedTokensBackend
from .catalogue import fault, helper
from .orders import in_other_order
from .parent import Metadata

_EXTEND, _EAGER = (ForwardMode.EXTEND,), ("eager",)
_ITS_ORDER = "the other kernel adds backwards three numbers whose sum depends on the order"


@fault(
    "general; decode kernels split keys until a GPU is full, and prefill kernels do not split",
    "mode-invariant",
    "in decode than the same rows",
    modes="extend",
    executions="eager",
)
class SplitCountOfDecodeByItsBatch(ModeInvariantBackend):
    """The number of splits in decode depends on the batch, and extend has no splits."""

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_decode = batch.forward_mode.is_decode()
        return super().plan(batch)

    def own_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return self.in_splits(lens, 1)

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return self.in_splits(lens, max(1, self.max_splits - len(lens) // 8) if self.is_decode else 1)

    @helper
    def in_splits(self, lens: torch.Tensor, splits: int) -> torch.Tensor:
        """[B] int32: keys in one split for this number of splits, in whole tiles."""
        return (-(-lens // (splits * self.tile)) * self.tile).clamp(min=self.tile)


@fault(
    "general; verify with a mask has a kernel of its own in most servers",
    "mode-invariant",
    "in target-verify than the same rows",
    modes="extend",
    executions="eager",
    modelled=_ITS_ORDER,
)
class OtherKernelForVerify(ModeInvariantBackend):
    """The kernel of target-verify adds in a different order than that of the other modes."""

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_verify = batch.forward_mode.is_target_verify()
        return super().plan(batch)

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return in_other_order(super().attend(q, layer, meta), self.is_verify)


@fault(
    "general; FlashInfer's and FA3's planners choose splits by the padded batch of a graph",
    "mode-invariant",
    "in a replay of decode in bucket",
    modes="extend",
    executions="eager",
)
class SplitCountByBucket(SplitsOfFixedTokensBackend):
    """Splits have more tokens in a graph with a small bucket; in eager mode they have a fixed number of tokens."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        chunk = super().plan_splits(lens)
        return chunk * 2 if self.in_graph and len(lens) < 4 else chunk


@fault(
    "general; max_seq_len is a number of the host, which a graph keeps from its capture",
    "mode-invariant",
    "in a replay of decode in bucket",
    modes="extend",
    executions="eager",
)
class SplitCountByLongestRequestOfCapture(SplitsOfFixedTokensBackend):
    """The size of splits in a capture follows from the longest possible request; an eager plan uses the real
    lengths."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        chunk = super().plan_splits(lens)
        return torch.full_like(chunk, self.pages * self.context.page_size) if self.in_graph else chunk


@fault(
    "general; a tile of rows or channels that is tuned by batch size, as in vLLM's unified attention",
    "mode-invariant",
    "in a replay of (decode|target-verify) in bucket",
    modes="extend",
    executions="eager",
    modelled=_ITS_ORDER,
)
class TileByBucket(SplitsOfFixedTokensBackend):
    """Graphs of more than two requests sum a product of q and k in two halves of the head dim."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return in_other_order(super().attend(q, layer, meta), self.in_graph and len(meta.kv_lens) > 2)


@fault(
    "general; a verify in a graph takes the kernel with a mask, an eager one that of prefills",
    "mode-invariant",
    "in a replay of target-verify in bucket",
    modes="extend",
    executions="eager",
    modelled=_ITS_ORDER,
)
class OtherKernelForVerifyInGraphs(SplitsOfFixedTokensBackend):
    """The kernel that graphs of target-verify record adds in a different order than the eager kernel."""

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_verify = batch.forward_mode.is_target_verify()
        return super().plan(batch)

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return in_other_order(super().attend(q, layer, meta), self.is_verify and self.in_graph)
