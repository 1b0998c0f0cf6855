"""Known-good backends of layers that compress keys."""

from __future__ import annotations

import torch

from .catalogue import control
from .compressors import CompressorParent, PackedParent


@control("compressors")
class CompressorsAsTheyAre(CompressorParent):
    """The parent of faults of compressors, whose softmax has a running maximum, as kernels have."""


@control()
class CompressedSumsRoundedBeforeTheNorm(CompressorParent):
    """The weighted sum is rounded to the model's dtype before its norm, and the row before its rotation, as DeepSeek's
    own ``Compressor`` does."""

    def summed(self, row: torch.Tensor) -> torch.Tensor:
        return row.to(self.context.dtype).float()

    def turned(self, row: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return super().turned(row.to(self.context.dtype).float(), by)


@control()
class PackedCompressedRows(PackedParent):
    """Rows of 584 bytes, packed with bytes of a page by hand, as vLLM's and SGLang's kernels of DeepSeek V4 do."""
