"""Class G: rows of numbers without a sign, and the number that means 0, which is left out or taken for another."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardMode
from attn_testkit.contract.row_format import UINT4

from .catalogue import fault
from .parent import Metadata
from .row_formats import RowFormatsBackend

_ALL = tuple(mode for mode in ForwardMode if mode is not ForwardMode.DRAFT_DECODE)
_BOTH = frozenset({"int8_zeros_per_token_head", "int4_zeros_per_token_head"})


class ZerosBackend(RowFormatsBackend):
    """Healthy parent: a store and a reader of its own for rows with a scale and a zero, which round half up
    (LMDeploy)."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": _BOTH})

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        packed, at = self.context.kv_pool.rows_of(layer), self.at(meta.slots.long())
        assert packed is not None
        halves = packed.format.planes[0].dtype == UINT4
        for rows, planes in zip((k, v), self.context.kv_pool.get_planes(layer.layer_id), strict=True):
            given = rows.float()
            low, high = self.ends(given)
            scale = self.not_zero((high - low) / (15 if halves else 255))
            zero = -low / scale
            codes = (given / scale + zero + 0.5).to(torch.uint8)
            if halves:
                first, second = codes.chunk(2, -1)
                codes = first + second * 16
            planes["numbers"].view(torch.uint8).index_put_(at, codes)
            planes["scales"].index_put_(at, scale)
            planes["zeros"].index_put_(at, zero)

    def ends(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, Hk, 1] float32: the smallest and the largest value of ``rows`` [T, Hk, D]."""
        return rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)

    def not_zero(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales, of which those of rows of zeros are 1."""
        return torch.where(scales > 0, scales, 1.0)


@fault("lmdeploy #4849", "writes-own-kv", "values|zeros", modes=_ALL)
class RangeWithMaskedLanes(ZerosBackend):
    """Lanes past the head's width are loaded as 0 and count in the range of a row, here at each width."""

    @override
    def ends(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = super().ends(rows)
        return low.clamp(max=0), high.clamp(min=0)


@fault("general; LMDeploy divides by it", "writes-own-kv finite matches-oracle", "zeros were divided by it", modes=_ALL)
class ScaleOfAConstantRowIsZero(ZerosBackend):
    """The range of a row of equal numbers is 0, and the row is divided by it."""

    @override
    def not_zero(self, scales: torch.Tensor) -> torch.Tensor:
        return scales


@fault("general", "matches-oracle", "zeros are left out", modes=_ALL)
class ZerosLeftOut(ZerosBackend):
    """Numbers are multiplied by their scale, and keep the offset of their row."""

    @override
    def without_zeros(self, numbers: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        return numbers


@fault("general; int8 zeros of other projects are integers", "matches-oracle", "rounded to integers", modes=_ALL)
class ZerosAsIntegers(ZerosBackend):
    """Zeros are rounded to integers before they are subtracted."""

    capabilities = ZerosBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"int4_zeros_per_token_head"}})

    @override
    def without_zeros(self, numbers: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        return super().without_zeros(numbers, zeros.round())


@fault("general; scales and zeros that alternate in one tensor", "matches-oracle", "of a head are used", modes=_ALL)
class ScaleAndZeroOfAnotherHead(ZerosBackend):
    """Each KV head gets the scale and the zero of the head before it."""

    @override
    def scales(self, plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return super().scales(plane, slots).roll(1, 2)


@fault("general; two orders of numbers of 4 bits", "matches-oracle", "adjacent numbers", modes=_ALL)
class HalvesOfARowAsAdjacentNumbers(ZerosBackend):
    """The two numbers of a byte are read as adjacent numbers, and they are half a row apart."""

    capabilities = ZerosBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"int4_zeros_per_token_head"}})

    @override
    def split(self, held: torch.Tensor) -> torch.Tensor:
        return self.halves(held)
