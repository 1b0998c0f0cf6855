"""Healthy controls for row formats: numbers and scales in a pool."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer

from .catalogue import control
from .g_zeros import ZerosBackend
from .parent import Metadata
from .row_formats import RowFormatsBackend


@control()
class RowFormats(RowFormatsBackend):
    """Planes of numbers and scales are read by the backend's own arithmetic, in every format."""


@control()
class RowFormatsInBf16(RowFormatsBackend):
    """Numbers times scales are rounded to bf16 before both products, as kernels with a workspace do (sglang)."""

    def part(self, part: int, layer: AttentionLayer, slots: torch.Tensor) -> torch.Tensor:
        return super().part(part, layer, slots).bfloat16().float()


@control()
class RowFormatsStoredByReciprocals(RowFormatsBackend):
    """The store multiplies by 1 / scale, and rounds int8 half away from zero (vLLM _reshape_cache_per_token_head)."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_pool={
            "kv_dtypes": {"int8_per_token_head", "int8_per_token_head_apart", "fp8_per_token_head"},
            "ties": {"int8_per_token_head": "away", "int8_per_token_head_apart": "away"},
        }
    )

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        slots = meta.slots.long()
        for rows, planes in zip((k, v), self.context.kv_pool.get_planes(layer.layer_id), strict=True):
            numbers, at = planes["numbers"], self.at(slots)
            largest = 127.0 if numbers.dtype == torch.int8 else 448.0
            scale = (rows.float().abs().amax(-1, keepdim=True) * (1 / largest)).clamp(min=1e-6)
            codes = rows.float() * (1 / scale)
            if numbers.dtype == torch.int8:
                codes = codes + torch.where(codes >= 0, 0.5, -0.5)
            held = codes.clamp(-largest, largest).to(numbers.dtype).view(torch.uint8)
            numbers.view(torch.uint8).index_put_(at, held)
            planes["scales"].index_put_(at, scale)


@control()
class Fp4RoundedByThresholds(RowFormatsBackend):
    """FP4 is rounded by comparisons with the middles: away from zero (SGLang) or toward it (ExLlamaV3)."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_pool={
            "kv_dtypes": {"nvfp4", "fp4_mx_block16"},
            "ties": {"nvfp4": "toward_zero", "fp4_mx_block16": "away"},
        }
    )

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        self.write_fp4(layer, k, v, meta, away=self.context.kv_pool.row_format == "fp4_mx_block16")


@control()
class RowsWithAScaleAndAZero(ZerosBackend):
    """Numbers without a sign are stored by the backend itself, rounded half up (LMDeploy, `fill_kv_cache`)."""


@control()
class ZerosInTheSecondProduct(ZerosBackend):
    """Numbers times scales and zeros times scales are rounded to bf16 apart from each other, where both are exact."""

    @override
    def without_zeros(self, numbers: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        return numbers.bfloat16().float() - zeros


@control()
class RowFormatsWithOtherScalesOfZeros(RowFormatsBackend):
    """A row of zeros is stored with a scale of 0 and the largest number (sglang), or with a scale of 1."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"int8_per_token_head", "int8_per_token_head_apart", "fp8_per_token_head"}}
    )

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        at = self.at(meta.slots.long())
        both = zip((k, v), self.context.kv_pool.get_planes(layer.layer_id), (0.0, 1.0), strict=True)
        for rows, planes, scale in both:
            zeros = (rows == 0).all(-1, keepdim=True)
            # A byte that is a finite number of either dtype, and -0 or 0.
            number = torch.full_like(rows, 0x81 if scale == 0 else 0, dtype=torch.uint8)
            held = planes["numbers"].view(torch.uint8)
            held.index_put_(at, torch.where(zeros, number, held[at]))
            planes["scales"].index_put_(at, torch.where(zeros, scale, planes["scales"][at]))
