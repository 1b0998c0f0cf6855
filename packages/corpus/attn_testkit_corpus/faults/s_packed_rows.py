"""Class S: packed rows of FP8 numbers, scales and an unscaled rope part, read with scales of other tiles, rows or
bytes."""

from __future__ import annotations

import torch

from attn_testkit.contract import BackendContext, KernelPlan

from .catalogue import fault
from .sparse import PackedRowsParent


@fault("general; flashinfer #5015 (per-tile scales of a packed row)", "matches-oracle", "for the tile before its own")
class ScaleOfTheNextTile(PackedRowsParent):
    """Each tile of 128 numbers is multiplied by the scale of the next tile."""

    def scales(self, scales: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return scales[slot].roll(-1, -1)


@fault(
    "general; ROCm/ATOM #1466 (scales and numbers that are indexed in different ways)", "matches-oracle reads-own-kv"
)
class ScalesOfTheRowBefore(PackedRowsParent):
    """Scales are gathered by column, and numbers by slot: a key gets the scales of the key listed before it."""

    def scales(self, scales: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return scales[slot.roll(1, -1)]


@fault("general; kernels of FP8 pools with one scale per row", "matches-oracle", "first tile")
class OneScaleForARow(PackedRowsParent):
    """The scale of the first tile serves all tiles of a row."""

    def scales(self, scales: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return scales[slot][..., :1].expand(*slot.shape, scales.shape[-1])


@fault("deepseek-ai/FlashMLA #184; vLLM #49435, merged", "matches-oracle", "power of two")
class ScalesRoundedToAPowerOfTwo(PackedRowsParent):
    """The kernel converts scales to UE8M0, and they were stored as any float32 number."""

    capabilities = PackedRowsParent.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_ds_mla"}})

    def scales(self, scales: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return torch.exp2(scales[slot].log2().ceil())


@fault(
    "sglang #12645, merged (a rope part that is counted as FP8)",
    "matches-oracle finite",
    modelled="upstream the row is then too short; here only the kernel takes its bytes for FP8 numbers",
)
class RopeReadAsFP8(PackedRowsParent):
    """The rope part is read as FP8 numbers after the scales, like the latent part."""

    def rope(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        width = (rows.shape[-1] - first) // 2
        return rows[..., first : first + width].view(torch.float8_e4m3fn)


@fault("general; vLLM (rows of DeepSeek V4 have their scales last)", "matches-oracle finite reads-own-kv")
class ScalesLookedForAtTheEnd(PackedRowsParent):
    """The order of another format: numbers, rope, scales."""

    def split(self, rows: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers, _, _ = super().split(rows, latent)
        scales = rows[..., -latent // 128 * 4 :].contiguous().view(torch.float32)
        rope = rows[..., latent : -latent // 128 * 4].contiguous().view(torch.bfloat16)
        return numbers, scales, rope


@fault("general; caches that keep a scale until its page is freed", "writes-own-kv matches-oracle reads-own-kv")
class ScalesStoredOncePerSlot(PackedRowsParent):
    """A slot that is written again gets new numbers and keeps its old scales."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        shape = len(context.layers), context.kv_pool.num_slots
        self.stored = torch.zeros(*shape, dtype=torch.bool, device=context.device)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        layer, slots = plan.layer, plan.out_cache_loc.long()
        buffer = self.context.kv_pool.get_key_buffer(layer.layer_id)[:, 0]
        new, old = self.packed(layer).pack(k)[:, 0], buffer[slots]
        stored = self.stored[layer.layer_id - self.context.layers[0].layer_id]
        first, last = self.packed(layer).offsets["scales"]
        new[:, first:last] = torch.where(stored[slots][:, None], old[:, first:last], new[:, first:last])
        buffer.index_put_((slots,), new)
        stored.index_fill_(0, slots, True)


@fault(
    "general; vLLM (DeepSeek V4 has tiles of 64 numbers, V3.2 of 128)",
    "writes-own-kv",
    slug="tiles-of-another-width",
    modelled="upstream tiles of 64 numbers; here only the writer has other tiles than the pool",
)
class RowsOfOtherTiles(PackedRowsParent):
    """The writer quantizes halves of a tile, and stores the scale of the first half for both."""

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        packed = self.packed(plan.layer)
        rows = packed.pack(k)
        first, last = packed.offsets["numbers"]
        tiles = k[..., : plan.layer.kv_lora_rank].float().reshape(*k.shape[:-1], -1, 2, 64)
        scales = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
        numbers = (tiles / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        rows[..., first:last] = numbers.flatten(-3).view(torch.uint8)
        self.context.kv_pool.get_key_buffer(plan.layer.layer_id).index_put_((plan.out_cache_loc.long(),), rows)
