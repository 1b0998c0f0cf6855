"""The healthy parent for KV pools of row formats. It reads planes by its own arithmetic."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import LATENT_FORMATS, ROW_FORMATS, AttentionLayer, BackendContext
from attn_testkit.contract.row_format import FP4, FP4_TIES, HALVES, INT4, POWER_OF_TWO, ZERO, in_tiles

from .parent import Metadata, PlannedBackend
from .pool_reads import read_at

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class RowFormatsBackend(PlannedBackend):
    """Healthy parent: numbers and scales are gathered from their planes, wherever these are stored."""

    capabilities = PlannedBackend.capabilities.with_changes(
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same", *ROW_FORMATS} - LATENT_FORMATS},
        server={"takes_unused_scales": True},
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.e2m1 = torch.tensor([*_E2M1, *(-size for size in _E2M1)], device=context.device)
        """[16] float32: numbers of FP4 by code."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        if self.context.kv_pool.dtype == q.dtype:
            layer = self.over_unquantized(layer)
        return super().attend(q, layer, meta)

    def over_unquantized(self, layer: AttentionLayer) -> AttentionLayer:
        """The layer without the scales of a checkpoint, which a pool in the model's dtype does not have."""
        return replace(layer, k_scale=1.0, v_scale=1.0)

    @override
    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.context.kv_pool.row_format:
            return super().gather(layer, slots)
        return self.part(0, layer, slots), self.part(1, layer, slots)

    def part(self, part: int, layer: AttentionLayer, slots: torch.Tensor) -> torch.Tensor:
        """[B, C, Hk, D] float32: keys (0) or values (1), not yet multiplied by ``k_scale`` or ``v_scale``."""
        packed = self.context.kv_pool.rows_of(layer)
        assert packed is not None
        planes = self.context.kv_pool.get_planes(layer.layer_id)
        found = read_at(planes[part]["numbers"], self.at(slots))
        first = packed.format.planes[0]
        dtype = first.dtype
        numbers = found
        if dtype in HALVES:
            codes = self.split(found.int()) if first.split else self.halves(found.int())
            numbers = self.e2m1[codes] if dtype == FP4 else (self.signed(codes) if dtype == INT4 else codes).float()
        # Zeros are the last plane, and come first.
        for plane in reversed(packed.scale_planes):
            scales = self.scales(planes[self.scales_from(part)][plane.name], slots)
            if plane.rule == ZERO:
                numbers = self.without_zeros(numbers, scales)
                continue
            if plane.dtype == POWER_OF_TWO:
                scales = torch.exp2(scales - 127)
            numbers = (in_tiles(numbers, plane.tile) * scales[..., None]).flatten(-2)
        by_head = self.head_scales(part, layer)
        return numbers if by_head is None else numbers * by_head[:, None]

    def at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page, and place in it, of each slot."""
        return slots // self.context.page_size, slots % self.context.page_size

    def halves(self, held: torch.Tensor) -> torch.Tensor:
        """[..., 2 n] codes of FP4 numbers in bytes [..., n]: the first in the lower half."""
        return torch.stack((held & 15, held >> 4), -1).flatten(-2)

    def split(self, held: torch.Tensor) -> torch.Tensor:
        """[..., 2 n] codes in bytes [..., n] whose lower halves are the first n."""
        return torch.cat((held & 15, held >> 4), -1)

    def without_zeros(self, numbers: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """Numbers [B, C, Hk, D] less the zeros [B, C, Hk, 1] of their rows."""
        return numbers - zeros

    def signed(self, codes: torch.Tensor) -> torch.Tensor:
        """Integers of 4 bits, from their codes 0 .. 15."""
        return torch.where(codes > 7, codes - 16, codes)

    def scales(self, plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[B, C, Hk, tiles] float32: scales of rows, of a plane [pages, page_size, Hk, tiles]."""
        return read_at(plane, self.at(slots))

    def scales_from(self, part: int) -> int:
        """The part, K (0) or V (1), whose scales are used for a part."""
        return part

    def head_scales(self, part: int, layer: AttentionLayer) -> torch.Tensor | None:
        """[Hk] float32: scales of KV heads, if the format has any."""
        return (layer.k_head_scales, layer.v_head_scales)[part]

    def write_fp4(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata, *, away: bool) -> None:
        """Store the numbers of FP4 rows again, rounded by comparisons with the middles. ``away``: a quotient that is
        equal to one is rounded away from zero."""
        at = self.at(meta.slots.long())
        all_planes = self.context.kv_pool.get_planes(layer.layer_id)
        for rows, planes, above in zip((k, v), all_planes, (layer.k_scale, layer.v_scale), strict=True):
            scales = planes["scales"][at].float()
            if planes["scales"].dtype == torch.uint8:
                scales, above = torch.exp2(scales - 127), 1.0
            quotients = (in_tiles(rows.float() / above, 16) / scales[..., None]).flatten(-2)
            codes = (quotients < 0).to(torch.uint8) * 8
            for middle in FP4_TIES:
                codes += quotients.abs() >= middle if away else quotients.abs() > middle
            planes["numbers"].index_put_(at, codes[..., 0::2] + codes[..., 1::2] * 16)

    def stored(self, layer: AttentionLayer, meta: Metadata) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        """Plane of scales of K and of V, as bytes [pages, page_size, Hk, bytes], each with the places of new rows."""
        planes = self.context.kv_pool.get_planes(layer.layer_id)
        return [(each["scales"].view(torch.uint8), self.at(meta.slots.long())) for each in planes if "scales" in each]
