"""``torch_native_compressor`` over compressed rows of FP8 with scales, as DeepSeek V4's servers store them."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import ROPE_IN_VALUE, Compressor, CompressorLayer
from .torch_native_compressor import TorchNativeCompressorBackend


class TorchNativeCompressorPackedBackend(TorchNativeCompressorBackend):
    """Rows of 584 and 528 bytes, with a head dim of 512."""

    capabilities = TorchNativeCompressorBackend.capabilities.with_changes(
        precision={"dtypes": {"bf16"}},
        compressor=Compressor(ratios={128}, overlapping_ratios={4}, rows=ROPE_IN_VALUE),
    )

    @override
    def put(self, layer: CompressorLayer, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Store compressed rows: numbers in one plane of a page, scales in the other."""
        packed = self.pool.packed(layer)
        assert packed is not None
        numbers, scales = self.pool.get_row_planes(layer.layer_id)
        page, place = target // numbers.shape[1], target % numbers.shape[1]
        raw = packed.pack(rows)
        numbers.index_put_((page, place), raw[:, : numbers.shape[-1]])
        scales.index_put_((page, place), raw[:, numbers.shape[-1] :])
