"""Class N: equal bits that are declared for a row of decode or verify and the same row of extend."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import AttentionLayer, ForwardBatch, ForwardMode
from .builds import ModeInvariantBackend
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
