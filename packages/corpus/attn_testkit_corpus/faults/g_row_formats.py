"""Class G: rows of 8 and 4 bits whose scales are those of another head, token, page, block, part, layer or step."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardMode

from .catalogue import fault
from .parent import Metadata
from .row_formats import RowFormatsBackend

_ALL = tuple(mode for mode in ForwardMode if mode is not ForwardMode.DRAFT_DECODE)
_PER_TOKEN_HEAD = {"int8_per_token_head", "fp8_per_token_head", "int8_per_token_head_apart"}
_FAR = 8192
_BLOCKS = {"nvfp4", "fp4_mx_block16", "int4_group8"}
"""Formats of two numbers to a byte, and a scale per block."""


@fault(
    "general; a stride of heads that belongs to the numbers",
    "matches-oracle",
    "the scales of a head are used for the next",
    modes=_ALL,
)
class RowScaleOfAnotherHead(RowFormatsBackend):
    """Each KV head is multiplied by the scales of the head before it."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": _PER_TOKEN_HEAD | _BLOCKS})

    def scales(self, plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return super().scales(plane, slots).roll(1, 2)


@fault(
    "general; scales that are indexed by column, and numbers by slot",
    "matches-oracle",
    "used for the key behind it",
    modes=_ALL,
)
class RowScaleOfAnotherToken(RowFormatsBackend):
    """A key gets the scales of the key before it."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": _PER_TOKEN_HEAD | _BLOCKS})

    def scales(self, plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return super().scales(plane, torch.cat((slots[:, :1], slots[:, :-1]), -1))


@fault(
    "general; caches with a scale per block (vLLM has one per token)",
    "matches-oracle",
    "of the first key of a page",
    modes=_ALL,
)
class RowScaleOfThePage(RowFormatsBackend):
    """All rows of a page are multiplied by the scales of its first slot."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": _PER_TOKEN_HEAD | _BLOCKS, "page_sizes": {4, 16}}
    )

    def scales(self, plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        page = self.context.page_size
        return super().scales(plane, slots // page * page)


@fault(
    "general; sglang #18154 and others of the per-tensor scales",
    "matches-oracle",
    "the scales of keys are used for values",
    modes=_ALL,
)
class RowScaleOfKeysForValues(RowFormatsBackend):
    """Values are multiplied by the scales of their keys."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": _PER_TOKEN_HEAD | _BLOCKS})

    def scales_from(self, part: int) -> int:
        return 0


@fault(
    "general; an order of two numbers in a byte that differs between packers",
    "matches-oracle",
    "halves of a byte",
    modes=_ALL,
)
class FP4HalvesSwapped(RowFormatsBackend):
    """The upper half of a byte is read as the first of its two numbers."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": _BLOCKS})

    def halves(self, held: torch.Tensor) -> torch.Tensor:
        return torch.stack((held >> 4, held & 15), -1).flatten(-2)


@fault(
    "general; codes of 4 bits that are read as 0 .. 15 (vLLM has them with a zero point, LightLLM without)",
    "matches-oracle",
    modes=_ALL,
)
class Int4WithoutSign(RowFormatsBackend):
    """Integers of 4 bits are read without their sign."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"int4_group8"}})

    def signed(self, codes: torch.Tensor) -> torch.Tensor:
        return codes


@fault(
    "rMLX #374",
    "matches-oracle",
    modes="decode",
    executions="eager",
    modelled="one format in one mode, without the threads that also index too few rows",
)
class FarInt4HasAnotherZero(RowFormatsBackend):
    """Integers of 4 bits of V are read as codes above a zero of 8 in requests of 8,192 keys and more."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        eager={"decode"},
        graph=(),
        heads={"families": {"mqa"}, "gqa_ratios": {4}, "head_dims": {64}},
        kv_pool={"kv_dtypes": {"same", "int4_group8"}, "page_sizes": {16}},
        windows=(),
        options={"logit_cap": False, "sinks": False},
        bounds={"max_topk": 0, "max_context_len": 1 << 15},
    )

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        self.far = meta.kv_lens >= _FAR
        return super().attend(q, layer, meta)

    def part(self, part: int, layer: AttentionLayer, slots: torch.Tensor) -> torch.Tensor:
        self.of_values = part == 1
        return super().part(part, layer, slots)

    def signed(self, codes: torch.Tensor) -> torch.Tensor:
        right = super().signed(codes)
        return torch.where(self.far.view(-1, 1, 1, 1), codes - 8, right) if self.of_values else right


@fault(
    "general; scales of blocks in another order than the kernel's (sglang: swizzled and linear ones)",
    "matches-oracle",
    "for the tile before its own",
    modes=_ALL,
)
class BlockScaleOffByOne(RowFormatsBackend):
    """Each block of 16 numbers is multiplied by the scale of the next block."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": _BLOCKS})

    def scales(self, plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return super().scales(plane, slots).roll(-1, -1)


@fault("general; flashinfer (scales that only one of two wrappers applies)", "matches-oracle", "k_scale", modes=_ALL)
class ScaleAboveBlocksLeftOut(RowFormatsBackend):
    """Blocks are multiplied by their own scale, but not by that of their layer."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"nvfp4"}})

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return super().attend(q, self.over_unquantized(layer), meta)


@fault(
    "general; vLLM (scales that are calculated in the first forward, after which they change in place)",
    "replay-follows-batch matches-oracle",
    modes=_ALL,
    executions="graph",
)
class HeadScalesOfTheCapture(RowFormatsBackend):
    """A graph reads a copy of the head scales from before its capture."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_per_head"}})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def head_scales(self, part: int, layer: AttentionLayer) -> torch.Tensor | None:
        now = super().head_scales(part, layer)
        if not self.in_graph or now is None:
            return now
        return self.kept.setdefault((part, layer.layer_id), now.clone())


@fault(
    "general; vLLM (a checkpoint of strategy attn_head, read by a kernel of one scale)",
    "matches-oracle",
    "the scale of KV head 0 is used for all",
    modes=_ALL,
)
class HeadScaleAsPerTensor(RowFormatsBackend):
    """The scale of head 0 is used for all heads."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_per_head"}})

    def head_scales(self, part: int, layer: AttentionLayer) -> torch.Tensor | None:
        now = super().head_scales(part, layer)
        return None if now is None else now[:1].expand_as(now)


@fault(
    "general; sglang (layer.k_scale_float is multiplied in, whatever the pool's dtype is)",
    "matches-oracle",
    "k_scale",
    modes=_ALL,
)
class UnusedScalesApplied(RowFormatsBackend):
    """A kernel multiplies by the scales of a checkpoint, although the pool holds K and V unscaled."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"same"}})

    def over_unquantized(self, layer: AttentionLayer) -> AttentionLayer:
        return layer


@fault("general; sglang (cache_k.div_(k_scale) in a pool that is not quantized)", "writes-own-kv", modes=_ALL)
class UnusedScalesInTheStore(RowFormatsBackend):
    """The store divides K and V by the scales of a checkpoint, although the pool holds them in the model's dtype."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"same"}})

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k / layer.k_scale, v / layer.v_scale, meta)


@fault(
    "vLLM #43810, #43869 (padding slots of -1 in plain indexing), of scales",
    "captures-cleanly writes-own-kv",
    "slot",
    modes=_ALL,
    executions="graph",
)
class RowScaleOfPaddingInTheLastSlot(RowFormatsBackend):
    """Values of padded rows are dropped, but their scales are stored in the last slot of the pool."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": _PER_TOKEN_HEAD | _BLOCKS}, server={"padding_slots": {-1}}
    )

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        slots, last = meta.slots.long(), self.context.kv_pool.num_slots - 1
        self.context.kv_pool.set_kv_buffer(layer, slots.clamp(min=0), k, v)
        own, other = self.at(slots.clamp(min=0)), self.at(torch.where(slots < 0, last, slots))
        for plane, _ in self.stored(layer, meta):
            plane.index_put_(other, plane[own])


@fault("general; a store of scales that is wider than a row", "writes-own-kv", "slot", modes=_ALL)
class RowScalesStoredTwoAtOnce(RowFormatsBackend):
    """A store of scales is twice as wide as a row, so it overwrites the next slot."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": _PER_TOKEN_HEAD | _BLOCKS})

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        slots = meta.slots.long()
        for plane, own in self.stored(layer, meta):
            plane.index_put_(self.at((slots + 1).clamp(max=self.context.kv_pool.num_slots - 1)), plane[own])
        super().write_kv(layer, k, v, meta)


@fault(
    "general; a scale per token where the format has one per token and head",
    "writes-own-kv",
    "one scale for all heads",
    modes=_ALL,
)
class RowScaleOfAllHeads(RowFormatsBackend):
    """The store computes one scale for all KV heads of a token."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"int8_per_token_head"}}, heads={"gqa_ratios": {2, 4}}
    )

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        pages = self.context.kv_pool.get_planes(layer.layer_id)
        for rows, planes in zip((k, v), pages, strict=True):
            scale = (rows.float().abs().amax((1, 2), keepdim=True) / 127).clamp(min=1e-6)
            at = self.at(meta.slots.long())
            planes["numbers"].index_put_(at, (rows.float() / scale).round().clamp(-127, 127).to(torch.int8))
            planes["scales"].index_put_(at, scale.expand(-1, rows.shape[1], 1).contiguous())


@fault(
    "general; vLLM _reshape_cache_per_token_head (a store of int8 truncates, so half is added before it)",
    "writes-own-kv",
    "truncated",
    modes=_ALL,
)
class Int8Truncated(RowFormatsBackend):
    """Quotients are truncated to int8 instead of rounded."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"int8_per_token_head"}})

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        for rows, planes in zip((k, v), self.context.kv_pool.get_planes(layer.layer_id), strict=True):
            at = self.at(meta.slots.long())
            cut = (rows.float() / planes["scales"][at]).trunc().clamp(-127, 127).to(torch.int8)
            planes["numbers"].index_put_(at, cut)


@fault("aiter #4195", "writes-own-kv finite", "a tile of zeros is NaN in it", modes=_ALL)
class RowScaleOfZeros(RowFormatsBackend):
    """The scale of a row of zeros is 0, and zeros are divided by it."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_per_token_head"}})

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        at = self.at(meta.slots.long())
        for rows, planes in zip((k, v), self.context.kv_pool.get_planes(layer.layer_id), strict=True):
            scale = rows.float().abs().amax(-1, keepdim=True) / 448
            codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            planes["numbers"].view(torch.uint8).index_put_(at, codes.view(torch.uint8))
            planes["scales"].index_put_(at, scale)


@fault(
    "general (half is added before a store truncates)",
    "writes-own-kv",
    "one step from the right",
    modes="decode extend",
)
class RowsRoundedHalfAwayFromZero(RowFormatsBackend):
    """Quotients halfway between two FP8 numbers are rounded away from zero, and all others to the nearest number."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        eager={"decode", "extend"},
        graph={"decode", "extend"},
        kv_pool={"kv_dtypes": {"fp8_per_token_head", "fp8_per_head"}},
    )
    JUST_ABOVE = 1 + 2.0**-15

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        at, scales = self.at(meta.slots.long()), (layer.k_head_scales, layer.v_head_scales)
        for rows, planes, by_head in zip((k, v), self.context.kv_pool.get_planes(layer.layer_id), scales, strict=True):
            if "scales" in planes:
                by = planes["scales"][at]
            else:
                assert by_head is not None
                by = by_head[:, None]
            codes = (rows.float() / by * self.JUST_ABOVE).clamp(-448, 448).to(torch.float8_e4m3fn)
            planes["numbers"].view(torch.uint8).index_put_(at, codes.view(torch.uint8))


@fault("vLLM #41954 (its fallback floor(x + 0.5))", "writes-own-kv", "one step from the right", modes="decode extend")
class IntegerTiesRoundUp(RowFormatsBackend):
    """Quotients between two integers are rounded up, and the rule is declared to be the even one."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"int8_per_token_head"}, "ties": {"int8_per_token_head": "even"}}
    )

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        for rows, planes in zip((k, v), self.context.kv_pool.get_planes(layer.layer_id), strict=True):
            at = self.at(meta.slots.long())
            codes = (rows.float() / planes["scales"][at] + 0.5).floor().clamp(max=127)
            planes["numbers"].index_put_(at, codes.to(torch.int8))


@fault(
    "SGLang's FP4MXBlock16KVQuantizeUtil, where hardware rounds to even",
    "writes-own-kv",
    "away from zero",
    modes="decode extend",
)
class Fp4TiesRoundAway(RowFormatsBackend):
    """Quotients between two FP4 numbers are rounded away from zero, and the rule is declared to be the even one."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"nvfp4", "fp4_mx_block16"}, "ties": {"nvfp4": "even", "fp4_mx_block16": "even"}}
    )

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        self.write_fp4(layer, k, v, meta, away=True)


@fault(
    "general (comparisons with > where the other store has >=)",
    "writes-own-kv",
    "nearer to zero",
    modes="decode extend",
)
class Fp4ThresholdsThatTruncate(RowFormatsBackend):
    """Quotients between two FP4 numbers stay at the smaller one, and the rule is declared to be away from zero."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"fp4_mx_block16"}, "ties": {"fp4_mx_block16": "away"}}
    )

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        self.write_fp4(layer, k, v, meta, away=False)
