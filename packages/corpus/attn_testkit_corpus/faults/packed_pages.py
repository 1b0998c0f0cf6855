"""Parents of faults of other packed rows of MLA: pages with scales after their numbers, and FP4 rows of 352 bytes."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import ROPE_IN_VALUE, AttentionLayer, BackendContext
from attn_testkit.contract.row_format import in_tiles

from .sparse import PackedRowsParent

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class PackedPagesParent(PackedRowsParent):
    """Healthy parent over rows of DeepSeek V4 and V4.1. It finds numbers and scales by their first bytes in a page."""

    capabilities = PackedRowsParent.capabilities.with_changes(
        heads={"mla_rope_dims": {0}}, kv_pool={"kv_dtypes": ROPE_IN_VALUE}
    )

    @property
    def is_v4(self) -> bool:
        """True for V4, which has a bf16 part of 64 numbers, and tiles of 64. False for V4.1, with tiles of 32."""
        return self.context.kv_pool.row_format == "fp8_ds_mla_v4"

    @property
    def tile(self) -> int:
        """Numbers that share a scale."""
        return 64 if self.is_v4 else 32

    def numbers(self, layer: AttentionLayer) -> int:
        """FP8 numbers of a row."""
        return layer.head_dim - 64 * self.is_v4

    def stride(self, layer: AttentionLayer) -> int:
        """Bytes from the numbers of a token to those of the next, its rope part included."""
        return self.numbers(layer) + 128 * self.is_v4

    def scale_stride(self, layer: AttentionLayer) -> int:
        """Bytes from the scales of a token to those of the next. In V4 one is unused."""
        return self.numbers(layer) // self.tile + self.is_v4

    def numbers_at(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Place in a page of the numbers of the token ``place`` of the page."""
        return place * self.stride(layer)

    def first_scale(self, layer: AttentionLayer) -> int:
        """Place in a page of the scales of its first token."""
        return self.context.page_size * self.stride(layer)

    def scales_at(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Place in a page of the scales of the token ``place`` of the page."""
        return self.first_scale(layer) + place * self.scale_stride(layer)

    def bytes_at(self, layer: AttentionLayer, page: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
        """[..., count] uint8: bytes of ``page`` from ``first`` on."""
        pages = self.context.kv_pool.get_layer_buffer(layer.layer_id)
        return pages[page[..., None], first[..., None] + torch.arange(count, device=page.device)]

    def powers(self, scales: torch.Tensor) -> torch.Tensor:
        """[..., tiles] float32: scales from their bytes."""
        return torch.exp2(scales.float() - 127).masked_fill(scales == 0xFF, torch.nan)

    def of_rope(self, held: torch.Tensor) -> torch.Tensor:
        """[..., 64] float32: the rope part from its 128 bytes."""
        return held.view(torch.bfloat16).float()

    @override
    def keys(self, rows: torch.Tensor, slot: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        page, place = slot // self.context.page_size, slot % self.context.page_size
        count = self.numbers(layer)
        held = self.bytes_at(layer, page, self.numbers_at(place, layer), self.stride(layer))
        scales = self.bytes_at(layer, page, self.scales_at(place, layer), count // self.tile)
        numbers = in_tiles(held[..., :count].contiguous().view(torch.float8_e4m3fn).float(), self.tile)
        found = (numbers * self.powers(scales)[..., None]).flatten(-2)
        return torch.cat([found, self.of_rope(held[..., count:].contiguous())], -1) if self.is_v4 else found


class Fp4RowsParent(PackedRowsParent):
    """Healthy parent over FP4 rows of 352 bytes for 512 + 64 numbers: FP4, FP8 of the rope part, scales in fours."""

    capabilities = PackedRowsParent.capabilities.with_changes(kv_pool={"kv_dtypes": {"nvfp4_ds_mla"}})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.e2m1 = torch.tensor([*_E2M1, *(-size for size in _E2M1)], device=context.device)
        """[16] float32: numbers of FP4 by code."""

    def ordered(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales [..., tiles] by tile: that of tile s is at ``s % 4 * (tiles // 4) + s // 4``."""
        tile = torch.arange(scales.shape[-1], device=scales.device)
        return scales[..., tile % 4 * (scales.shape[-1] // 4) + tile // 4]

    @override
    def keys(self, rows: torch.Tensor, slot: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        held, latent = rows.flatten(0, 2)[slot], layer.kv_lora_rank
        first = latent // 2 + layer.head_dim - latent
        codes = torch.stack((held[..., : latent // 2] & 15, held[..., : latent // 2] >> 4), -1).flatten(-2).long()
        scales = self.ordered(held[..., first:].contiguous().view(torch.float8_e4m3fn).float())
        numbers = (in_tiles(self.e2m1[codes], 16) * scales[..., None]).flatten(-2)
        rope = held[..., latent // 2 : first].contiguous().view(torch.float8_e4m3fn).float()
        return torch.cat([numbers, rope], -1)
