"""Class N: equal bits that are declared for a row of decode or verify and the same row of extend."""

from __future__ import annotations

import torch

from ..contract import AttentionLayer, ForwardBatch, ForwardMode
from .builds import ModeInvariantBackend, SplitsOfFixedTokensBackend
from .catalogue import fault
from .parent import Metadata

_EXTEND, _EAGER = (ForwardMode.EXTEND,), ("eager",)


@fault(
    "general; decode kernels split keys until a GPU is full, and prefill kernels do not split",
    "mode-invariant",
    "in decode than the same rows",
    modes="extend",
    executions="eager",
)
class SplitCountOfDecodeByItsBatch(ModeInvariantBackend):
    """Decode has as many splits as its batch leaves room for, and extend has none."""

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_decode = batch.forward_mode.is_decode()
        return super().plan(batch)

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        splits = max(1, self.max_splits - len(lens) // 8) if self.is_decode else 1
        return (-(-lens // (splits * self.tile)) * self.tile).clamp(min=self.tile)


@fault(
    "general; verify with a mask has a kernel of its own in most servers",
    "mode-invariant",
    "in target-verify than the same rows",
    modes="extend",
    executions="eager",
)
class OtherKernelForVerify(ModeInvariantBackend):
    """The kernel of target-verify multiplies queries by the scale before the product, and the others after it."""

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_verify = batch.forward_mode.is_target_verify()
        return super().plan(batch)

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        scale = 1.1 if self.is_verify else 1.0
        return super().logits(rows * scale, keys / scale, layer)


@fault(
    "general; FlashInfer's and FA3's planners choose splits by the padded batch of a graph",
    "mode-invariant",
    "in a replay of decode in bucket",
    modes="extend",
    executions="eager",
)
class SplitCountByBucket(SplitsOfFixedTokensBackend):
    """A graph has splits of more tokens in small buckets. Eager mode has those of a fixed number."""

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
    """Splits hold as many tokens as the longest request of the table may have, which the capture does not know better;
    an eager plan knows the lengths."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        chunk = super().plan_splits(lens)
        return torch.full_like(chunk, self.pages * self.context.page_size) if self.in_graph else chunk


@fault(
    "general; a tile of rows or channels that is tuned by batch size, as in vLLM's unified attention",
    "mode-invariant",
    "in a replay of (decode|target-verify) in bucket",
    modes="extend",
    executions="eager",
)
class TileByBucket(SplitsOfFixedTokensBackend):
    """Graphs of more than two requests sum a product of q and k in two halves of the head dim."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if not self.in_graph or len(self.bucket_lens) <= 2 or layer.logit_cap:
            return super().logits(rows, keys, layer)
        half = rows.shape[-1] // 2
        one = super().logits(rows[..., :half], keys[..., :half], layer)
        return one + super().logits(rows[..., half:], keys[..., half:], layer)

    def plan(self, batch: ForwardBatch) -> Metadata:
        found = super().plan(batch)
        self.bucket_lens = found.kv_lens
        return found


@fault(
    "general; a verify in a graph takes the kernel with a mask, an eager one that of prefills",
    "mode-invariant",
    "in a replay of target-verify in bucket",
    modes="extend",
    executions="eager",
)
class OtherKernelForVerifyInGraphs(SplitsOfFixedTokensBackend):
    """The kernel that graphs of target-verify record multiplies queries by the scale before the product."""

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.is_verify = batch.forward_mode.is_target_verify()
        return super().plan(batch)

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        scale = 1.1 if self.is_verify and self.in_graph else 1.0
        return super().logits(rows * scale, keys / scale, layer)
