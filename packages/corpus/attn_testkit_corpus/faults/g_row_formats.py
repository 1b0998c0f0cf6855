"""Class G: rows of 8 and 4 bits whose scales are those of another head, token, page, block, part, layer or step."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardMode

from .catalogue import fault
from .parent import Metadata
from .row_formats import RowFormatsBackend

_ALL = tuple(mode for mode in ForwardMode if mode is not ForwardMode.DRAFT_DECODE)
_PER_TOKEN_HEAD = {"int8_per_token_head", "fp8_per_token_head", "int8_per_token_head_apart"}
_BLOCKS = {"nvfp4", "fp4_mx_block16", "int4_group8"}
"""Formats of two numbers to a byte, and a scale per block."""


@fault(
    slug="row-scale-of-another-head",
    source="general; a stride of heads that belongs to the numbers",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="the scales of a head are used for the next",
)
class RowScaleOfAnotherHead(RowFormatsBackend):
    """Each KV head is multiplied by the scales of the head before it."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes=_PER_TOKEN_HEAD | _BLOCKS)

    @override
    def scales(self, plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return super().scales(plane, slots).roll(1, 2)


@fault(
    slug="row-scale-of-another-token",
    source="general; scales that are indexed by column, and numbers by slot",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="used for the key behind it",
)
class RowScaleOfAnotherToken(RowFormatsBackend):
    """A key gets the scales of the key before it."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes=_PER_TOKEN_HEAD | _BLOCKS)

    @override
    def scales(self, plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return super().scales(plane, torch.cat((slots[:, :1], slots[:, :-1]), -1))


@fault(
    slug="row-scale-of-the-page",
    source="general; caches with a scale per block (vLLM has one per token)",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="of the first key of a page",
)
class RowScaleOfThePage(RowFormatsBackend):
    """All rows of a page are multiplied by the scales of its first slot."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes=_PER_TOKEN_HEAD | _BLOCKS, page_sizes={4, 16})

    @override
    def scales(self, plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        page = self.context.page_size
        return super().scales(plane, slots // page * page)


@fault(
    slug="row-scale-of-keys-for-values",
    source="general; sglang #18154 and others of the per-tensor scales",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="the scales of keys are used for values",
)
class RowScaleOfKeysForValues(RowFormatsBackend):
    """Values are multiplied by the scales of their keys."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes=_PER_TOKEN_HEAD | _BLOCKS)

    @override
    def scales_from(self, part: int) -> int:
        return 0


@fault(
    slug="fp4-halves-swapped",
    source="general; an order of two numbers in a byte that differs between packers",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="halves of a byte",
)
class FP4HalvesSwapped(RowFormatsBackend):
    """The upper half of a byte is read as the first of its two numbers."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes=_BLOCKS)

    @override
    def halves(self, held: torch.Tensor) -> torch.Tensor:
        return torch.stack((held >> 4, held & 15), -1).flatten(-2)


@fault(
    slug="int4-without-sign",
    source="general; codes of 4 bits that are read as 0 .. 15 (vLLM has them with a zero point, LightLLM without)",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="",
)
class Int4WithoutSign(RowFormatsBackend):
    """Integers of 4 bits are read without their sign."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes={"int4_group8"})

    @override
    def signed(self, codes: torch.Tensor) -> torch.Tensor:
        return codes


@fault(
    slug="block-scale-off-by-one",
    source="general; scales of blocks in another order than the kernel's (sglang: swizzled and linear ones)",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="for the tile before its own",
)
class BlockScaleOffByOne(RowFormatsBackend):
    """Each block of 16 numbers is multiplied by the scale of the block behind it."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes=_BLOCKS)

    @override
    def scales(self, plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return super().scales(plane, slots).roll(-1, -1)


@fault(
    slug="scale-above-blocks-left-out",
    source="general; flashinfer (scales that only one of two wrappers applies)",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="k_scale",
)
class ScaleAboveBlocksLeftOut(RowFormatsBackend):
    """Blocks are multiplied by their own scale, and not by that of their layer."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes={"nvfp4"})

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return super().attend(q, self.over_unquantized(layer), meta)


@fault(
    slug="head-scales-of-the-capture",
    source="general; vLLM (scales that are calculated in the first forward, after which they change in place)",
    modes=_ALL,
    executions=("graph",),
    checks=("replay-follows-batch", "matches-oracle"),
    hint="",
)
class HeadScalesOfTheCapture(RowFormatsBackend):
    """A graph has a copy of the scales that heads had before its capture."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes={"fp8_per_head"})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    @override
    def head_scales(self, part: int, layer: AttentionLayer) -> torch.Tensor | None:
        now = super().head_scales(part, layer)
        if not self.in_graph or now is None:
            return now
        return self.kept.setdefault((part, layer.layer_id), now.clone())


@fault(
    slug="head-scale-as-per-tensor",
    source="general; vLLM (a checkpoint of strategy attn_head, read by a kernel of one scale)",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="the scale of KV head 0 is used for all",
)
class HeadScaleAsPerTensor(RowFormatsBackend):
    """The scale of head 0 is used for all heads."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes={"fp8_per_head"})

    @override
    def head_scales(self, part: int, layer: AttentionLayer) -> torch.Tensor | None:
        now = super().head_scales(part, layer)
        return None if now is None else now[:1].expand_as(now)


@fault(
    slug="unused-scales-applied",
    source="general; sglang (layer.k_scale_float is multiplied in, whatever the pool's dtype is)",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="k_scale",
)
class UnusedScalesApplied(RowFormatsBackend):
    """A kernel multiplies by the scales of a checkpoint, and the pool holds K and V as given."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes={"same"})

    @override
    def over_unquantized(self, layer: AttentionLayer) -> AttentionLayer:
        return layer


@fault(
    slug="unused-scales-in-the-store",
    source="general; sglang (cache_k.div_(k_scale) in a pool that is not quantized)",
    modes=_ALL,
    checks=("writes-own-kv",),
    hint="",
)
class UnusedScalesInTheStore(RowFormatsBackend):
    """The store divides K and V by the scales of a checkpoint, and the pool holds them in the model's dtype."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes={"same"})

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k / layer.k_scale, v / layer.v_scale, meta)


@fault(
    slug="row-scale-of-padding-in-the-last-slot",
    source="vLLM #43810, #43869 (padding slots of -1 in plain indexing), of scales",
    modes=_ALL,
    executions=("graph",),
    checks=("captures-cleanly", "writes-own-kv"),
    hint="slot",
)
class RowScaleOfPaddingInTheLastSlot(RowFormatsBackend):
    """Numbers of padded rows are dropped, and their scales are stored in the last slot of the pool."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_dtypes=_PER_TOKEN_HEAD | _BLOCKS, server={"padding_slots": {-1}}
    )

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        slots, last = meta.slots.long(), self.context.kv_pool.num_slots - 1
        self.context.kv_pool.set_kv_buffer(layer, slots.clamp(min=0), k, v)
        own, other = self.at(slots.clamp(min=0)), self.at(torch.where(slots < 0, last, slots))
        for plane, _ in self.stored(layer, meta):
            plane.index_put_(other, plane[own])


@fault(
    slug="row-scales-stored-two-at-once",
    source="general; a store of scales that is wider than a row",
    modes=_ALL,
    checks=("writes-own-kv",),
    hint="slot",
)
class RowScalesStoredTwoAtOnce(RowFormatsBackend):
    """A store of scales is twice as wide as a row, and ends in the next slot."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes=_PER_TOKEN_HEAD | _BLOCKS)

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        slots = meta.slots.long()
        for plane, own in self.stored(layer, meta):
            plane.index_put_(self.at((slots + 1).clamp(max=self.context.kv_pool.num_slots - 1)), plane[own])
        super().write_kv(layer, k, v, meta)


@fault(
    slug="row-scale-of-all-heads",
    source="general; a scale per token where the format has one per token and head",
    modes=_ALL,
    checks=("writes-own-kv",),
    hint="one scale for all heads",
)
class RowScaleOfAllHeads(RowFormatsBackend):
    """The store computes one scale for all KV heads of a token."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes={"int8_per_token_head"}, gqa_ratios={2, 4})

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        pages = self.context.kv_pool.get_planes(layer.layer_id)
        for rows, planes in zip((k, v), pages, strict=True):
            scale = (rows.float().abs().amax((1, 2), keepdim=True) / 127).clamp(min=1e-6)
            at = self.at(meta.slots.long())
            planes["numbers"].index_put_(at, (rows.float() / scale).round().clamp(-127, 127).to(torch.int8))
            planes["scales"].index_put_(at, scale.expand(-1, rows.shape[1], 1).contiguous())


@fault(
    slug="int8-truncated",
    source="general; vLLM _reshape_cache_per_token_head (a store of int8 truncates, so half is added before it)",
    modes=_ALL,
    checks=("writes-own-kv",),
    hint="truncated",
)
class Int8Truncated(RowFormatsBackend):
    """Quotients are truncated to int8 instead of rounded."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes={"int8_per_token_head"})

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        for rows, planes in zip((k, v), self.context.kv_pool.get_planes(layer.layer_id), strict=True):
            at = self.at(meta.slots.long())
            cut = (rows.float() / planes["scales"][at]).trunc().clamp(-127, 127).to(torch.int8)
            planes["numbers"].index_put_(at, cut)


@fault(
    slug="row-scale-of-zeros",
    source="aiter #4195",
    modes=_ALL,
    checks=("writes-own-kv", "finite"),
    hint="a tile of zeros is NaN in it",
)
class RowScaleOfZeros(RowFormatsBackend):
    """The scale of a row of zeros is 0, and zeros are divided by it."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_dtypes={"fp8_per_token_head"})

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        at = self.at(meta.slots.long())
        for rows, planes in zip((k, v), self.context.kv_pool.get_planes(layer.layer_id), strict=True):
            scale = rows.float().abs().amax(-1, keepdim=True) / 448
            codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            planes["numbers"].view(torch.uint8).index_put_(at, codes.view(torch.uint8))
            planes["scales"].index_put_(at, scale)
