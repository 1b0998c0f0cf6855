"""Class S: packed rows of DeepSeek V4, V4.1 and FP4 rows of 352 bytes, whose scales or rope part are looked for
elsewhere."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, KernelPlan

from .catalogue import fault
from .packed_pages import Fp4RowsParent, PackedPagesParent

_V4 = PackedPagesParent.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_ds_mla_v4"}})
_V41 = PackedPagesParent.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_ds_mla_v41"}})


@fault("general; kernels of rows of 656 bytes, which hold their scales", "matches-oracle finite reads-own-kv")
class ScalesLookedForAfterTheirRow(PackedPagesParent):
    """The scales of a token are read behind its numbers, and not after the numbers of the page."""

    def scales_at(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return (place + 1) * self.stride(layer)


@fault(
    "vLLM #50576, a comment (the index keys of DeepSeek V4)",
    "matches-oracle finite reads-own-kv",
    modelled="upstream float32 scales of index keys of 128 numbers, which have planes in a page, too",
)
class PagesReadTokenByToken(PackedPagesParent):
    """Each token is read as its numbers and then its scales, which needs as many bytes of a page."""

    def numbers_at(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return place * (self.stride(layer) + self.scale_stride(layer))

    def scales_at(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return self.numbers_at(place, layer) + self.stride(layer)


@fault(
    "vLLM #47493, merged (blocks of all layers, whose stride FlashInfer does not read)",
    "matches-oracle finite reads-own-kv",
    modelled="upstream a block holds other layers, too; here only the padding of a page lies between",
)
class PagesWithoutTheirStride(PackedPagesParent):
    """Pages are found by the bytes of their rows, without the unused memory after them."""

    def bytes_at(self, layer: AttentionLayer, page: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
        used = self.context.page_size * (self.stride(layer) + self.scale_stride(layer))
        pages = self.context.kv_pool.get_layer_buffer(layer.layer_id)
        at = (page * used + first)[..., None] + torch.arange(count, device=page.device)
        return pages[at // pages.shape[1], at % pages.shape[1]]


@fault(
    "vLLM (a comment in quantize_and_insert_k_kernel: a block times its stride exceeds 2^31)",
    "matches-oracle finite reads-own-kv",
    modes="decode extend",
    modelled="upstream a negative offset is before the pool; here it is taken modulo the pool",
)
class PageTimesItsBytesIn32Bits(PackedPagesParent):
    """The first byte of a page is a product of 32-bit integers, which is negative beyond 2^31 bytes."""

    capabilities = PackedPagesParent.capabilities.with_changes(
        eager={"decode", "extend"}, graph={"decode", "extend"}, bounds={"max_topk": 0}
    )

    def bytes_at(self, layer: AttentionLayer, page: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
        whole = self.context.kv_pool.get_layer_buffer(layer.layer_id).shape[1]
        start = (page.to(torch.int32) * whole).long() // whole
        return super().bytes_at(layer, start % self.context.kv_pool.spec.pages, first, count)


@fault("general; a table of scales that is indexed by the next token", "matches-oracle finite reads-own-kv")
class ScalesOfTheNextTokenOfAPage(PackedPagesParent):
    """A token has the scales of the next token of its page."""

    def scales_at(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().scales_at((place + 1) % self.context.page_size, layer)


@fault(
    "general; vLLM (pages of 64 rows next to blocks of 256 tokens)",
    "matches-oracle finite reads-own-kv",
    modelled="upstream a kernel's page of 64 rows in a pool of 256; here half the page size of the pool",
)
class ScalesOfAnotherPageSize(PackedPagesParent):
    """The place of the scales in a page is computed with another page size than that of the pool."""

    def first_scale(self, layer: AttentionLayer) -> int:
        return super().first_scale(layer) // 2


@fault("general; loads of 8 scales of which 7 count", "finite matches-oracle reads-own-kv")
class UnusedByteAsAScale(PackedPagesParent):
    """Each tile has the scale after its own, and the last one has the unused byte."""

    capabilities = _V4

    def scales_at(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().scales_at(place, layer) + 1


@fault("vLLM #56893, merged (V4.1 packs the rope part, V4 does not)", "matches-oracle finite")
class RopeOfV4ReadAsFP8(PackedPagesParent):
    """The first half of the bf16 part is read as 64 FP8 numbers."""

    capabilities = _V4

    def of_rope(self, held: torch.Tensor) -> torch.Tensor:
        return held[..., :64].contiguous().view(torch.float8_e4m3fn).float()


@fault("general; kernels of V3.2, whose values end before the rope part", "matches-oracle", "are left out")
class ValuesWithoutTheirRopePart(PackedPagesParent):
    """Values are cut at the rope part, so the last 64 numbers of an output are 0."""

    capabilities = _V4

    def values(self, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return torch.cat([keys[..., :-64], torch.zeros_like(keys[..., -64:])], -1)


@fault("general; vLLM #56893, merged (tiles of 64 numbers, then of 32)", "matches-oracle")
class TilesOfV4InV41(PackedPagesParent):
    """Two tiles of 32 numbers have the scale of the first of them."""

    capabilities = _V41

    def powers(self, scales: torch.Tensor) -> torch.Tensor:
        return super().powers(scales)[..., ::2].repeat_interleave(2, -1)


@fault("general; scales stored without the unused byte between them", "writes-own-kv")
class ScalesStoredWithoutUnusedBytes(PackedPagesParent):
    """A store puts 7 scales of a token next to those of the token before, without the unused byte."""

    capabilities = _V4

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        layer, slot = plan.layer, plan.out_cache_loc.long()
        pool, page, place = self.context.kv_pool, slot // self.context.page_size, slot % self.context.page_size
        rows = self.packed(layer).pack(k)[:, 0]
        pool.get_kv_pages(layer.layer_id)[0][page, place, 0] = rows[:, : self.stride(layer)]
        scales = rows[:, self.stride(layer) : -1]
        first = self.first_scale(layer) + place * scales.shape[1]
        pages = pool.get_layer_buffer(layer.layer_id)
        pages[page[:, None], first[:, None] + torch.arange(scales.shape[1], device=page.device)] = scales


@fault("FlashMLA of vLLM #18, merged (scales of every fourth tile are adjacent)", "matches-oracle", "every 4 tiles")
class ScalesInTheOrderOfTiles(Fp4RowsParent):
    """Scales of FP4 rows are read in the order of tiles."""

    def ordered(self, scales: torch.Tensor) -> torch.Tensor:
        return scales


@fault("vLLM #51724, merged (e4m3 scales are rounded up)", "writes-own-kv", "e4m3 number too small")
class ScalesOfFp4RowsRoundedToTheNearest(Fp4RowsParent):
    """Scales of FP4 rows are rounded to the nearest e4m3 number, so the largest number of a tile may be cut off."""

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        packed = self.packed(plan.layer)
        rows, plane = packed.pack(k), packed.format.planes[-1]
        nearest = packed.exact_scales(plane, k).to(plane.dtype).view(torch.uint8)
        packed.put_by_tile(rows, plane, nearest[..., None])
        self.context.kv_pool.get_key_buffer(plan.layer.layer_id).index_put_((plan.out_cache_loc.long(),), rows)
