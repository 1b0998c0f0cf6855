"""Rows of a format that are written or read with the wrong codes, scales or strides. See ``nineteenth_set.md``."""

from __future__ import annotations

import torch
from parents_mode import KnowsMode

from attn_testkit.backends.torch_native import TorchNativeBackend, _Seen
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode
from attn_testkit_corpus.faults.catalogue import bug, helper


class Moded(KnowsMode, TorchNativeFormatsBackend):
    """The healthy parent, which also knows the mode of its step and where it stores."""

    @property
    def format(self) -> str:
        return self.context.kv_pool.row_format

    def _store(
        self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, save_kv_cache: bool
    ) -> None:
        if not (save_kv_cache and self.format and self.concerns(layer)) or layer.is_cross_attention:
            super()._store(k, v, layer, batch, save_kv_cache)
            return
        group, page = self.context.group_of(layer), self.context.page_size
        slots = group.cache_loc(batch).clamp(min=0)
        at = slots // page, slots % page
        planes = group.kv_pool.get_planes(layer.layer_id)
        before = [{name: bytes_of(each)[at] for name, each in part.items()} for part in planes]
        super()._store(k, v, layer, batch, save_kv_cache)
        for part, rows in enumerate((k, v)):
            rows = rows.reshape(-1, layer.tp_k_head_num, layer.head_dim)
            self.spoil(part, rows, planes[part], at, before[part], layer)

    def concerns(self, layer: AttentionLayer) -> bool:
        """True if stores of the layer are wrong."""
        return False

    def spoil(
        self,
        part: int,
        rows: torch.Tensor,
        planes: dict[str, torch.Tensor],
        at: tuple[torch.Tensor, ...],
        before: dict[str, torch.Tensor],
        layer: AttentionLayer,
    ) -> None:
        """Change what was stored of ``rows`` [T, Hk, D] in ``planes`` of K (0) or V (1)."""


def bytes_of(plane: torch.Tensor) -> torch.Tensor:
    """[..., bytes] uint8: a view."""
    return plane.view(torch.uint8)


def put(plane: torch.Tensor, at: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
    """Write ``rows`` [T, Hk, n] in the dtype of the plane."""
    bytes_of(plane).index_put_(at, rows.contiguous().view(torch.uint8))


@bug(
    19,
    "sglang #40581",
    "decode-mha2-d32-bf16-p128-k600.70.12-interleaved-one_hot-kvfp8pertokenhead-w46-cap1.5-sink-b3prod",
    "writes-own-kv",
)
class SoftwareFp8(Moded):
    """sglang #40581: exponents of 15 and more saturate, and halves are rounded up."""

    def concerns(self, layer: AttentionLayer) -> bool:
        return self.format == "fp8_per_token_head"

    def spoil(self, part, rows, planes, at, before, layer):  # type: ignore[no-untyped-def]
        packed = self.context.kv_pool.rows_of(layer)
        number = packed.quotients(packed.format.planes[0], rows).flatten(-2).clamp(-448, 448)
        size = number.abs()
        unit = torch.exp2(torch.floor(torch.log2(size.clamp(min=2.0**-6))) - 3)
        rounded = torch.where(size >= 256, 448.0, torch.floor(size / unit + 0.5) * unit)
        rounded = torch.where(size < 2.0**-6, size, rounded)
        put(planes["numbers"], at, rounded.copysign(number).to(torch.float8_e4m3fn))


@bug(
    19,
    "FreeToken #354",
    "decode-gqa8x2-d128r64-bf16-p32-k31.32.33-shared-rising_logits-kvfp8e4m3-w0-alibi-layers2from5groups-b6stale-given_out-padded_tokens-overlap_scheduling-freed_null_page",
    "writes-own-kv",
)
class PitchOfKeys(TorchNativeBackend):
    """FreeToken #354: one stride of rows is passed for K and V."""

    def _store(
        self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, save_kv_cache: bool
    ) -> None:
        fp8 = self.context.group_of(layer).kv_pool.dtype.itemsize == 1
        if save_kv_cache and fp8 and not layer.is_cross_attention and not layer.kv_lora_rank:
            memory = torch.empty(0, dtype=v.dtype, device=v.device).set_(v.untyped_storage())
            sizes = [torch.arange(size, device=v.device) for size in v.shape]
            place = v.storage_offset() + sizes[0][:, None, None] * k.stride(0) + sizes[1][:, None] * v.stride(1)
            # Behind the tensor there is other memory of the process.
            v = memory[(place + sizes[2]).clamp(max=len(memory) - 1)]
        super()._store(k, v, layer, batch, save_kv_cache)


@bug(
    19,
    "openvino #36480",
    "decode-gqa2x2-d512-bf16-p16-k1025.33-shuffled-gauss-kvint8zerospertokenhead-layers1from0-b2prod",
    "writes-own-kv",
)
class GroupsOfHeadOverlap(Moded):
    """openvino #36480: with 512 numbers in a head, those from 272 on are not written."""

    def concerns(self, layer: AttentionLayer) -> bool:
        return self.format == "int8_zeros_per_token_head" and layer.head_dim >= 512

    def spoil(self, part, rows, planes, at, before, layer):  # type: ignore[no-untyped-def]
        put(planes["numbers"][..., 272:], at, before["numbers"][..., 272:])


@bug(
    19,
    "vllm-ascend #9377",
    "decode-mha2-d32-bf16-p128-k600.70.12-interleaved-one_hot-kvfp8pertokenhead-w46-cap1.5-sink-b3prod",
    "writes-own-kv",
    execution="graph",
)
class ValuesScaledAlongTokens(Moded):
    """vllm-ascend #9377: the scale of V is the largest of all tokens of the step."""

    def concerns(self, layer: AttentionLayer) -> bool:
        return self.format in ("int8_per_token_head", "fp8_per_token_head", "int8_per_token_head_apart")

    def spoil(self, part, rows, planes, at, before, layer):  # type: ignore[no-untyped-def]
        if part == 0:
            return
        rows = rows.float()
        largest = 448.0 if self.format.startswith("fp8") else 127.0
        scales = (
            (rows.nan_to_num(0.0).abs().amax((0, 2)) / largest).clamp(min=1e-6)[None, :, None].expand(len(rows), -1, 1)
        )
        numbers = (rows / scales).clamp(-largest, largest)
        dtype = planes["numbers"].dtype
        put(planes["numbers"], at, numbers.to(dtype) if dtype.is_floating_point else numbers.round().to(dtype))
        put(planes["scales"], at, scales)


@bug(
    19,
    "vllm #38874",
    "decode-gqa2x2-d32-bf16-p32-k1061-shared-mean-kvfp8pertokenhead-kvhnd-w11-spanswidebylayer-cap1.5-sink-layers2from0groups-b1prod-padded_tokens-freed_null_page",
    "writes-own-kv",
)
class ScalesLikeNhd(Moded):
    """vllm #38874: views of the scales have the strides of slots before heads, where heads come first."""

    def concerns(self, layer: AttentionLayer) -> bool:
        in_rows = self.format in ("int8_per_token_head", "fp8_per_token_head")
        return in_rows and self.context.kv_pool.layout == "hnd"

    @helper
    def places(self, place: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot in the page [..., Hk] and head [..., Hk] whose row has the scale of each head of slot ``place``."""
        row = place[..., None] * heads + torch.arange(heads, device=place.device)
        return row % self.context.page_size, row // self.context.page_size

    def spoil(self, part, rows, planes, at, before, layer):  # type: ignore[no-untyped-def]
        scales, (page, place) = bytes_of(planes["scales"]), at
        new = scales[at].clone()
        put(planes["scales"], at, before["scales"])
        slot, head = self.places(place, layer.tp_k_head_num)
        scales.index_put_((page[:, None].expand_as(slot), slot, head), new)

    def _rows(self, part: int, places: tuple[torch.Tensor, ...], layer: AttentionLayer) -> torch.Tensor:
        rows = super()._rows(part, places, layer)
        if not self.concerns(layer):
            return rows
        packed, (page, place) = self.context.kv_pool.rows_of(layer), places
        pages = self.context.group_of(layer).kv_pool.get_kv_pages(layer.layer_id)[part]
        first, end = packed.offsets["scales"]
        slot, head = self.places(place, layer.tp_k_head_num)
        found = pages[page[..., None].expand_as(slot), slot, head]
        return torch.cat([rows[..., :first], found[..., first:end], rows[..., end:]], -1)


@bug(
    19,
    "vllm #55696",
    "extend-mha2-d256-bf16-p1-k3.21.5.17-n5a7.8.2.1-contiguous-rising_logits-kvnvfp4-w46-cap1.5-sink-b4prod",
)
class OutputThroughFp8(Moded):
    """vllm #55696: the kernel of FP4 keys writes e4m3, which is copied to the dtype of the model."""

    def _attend(self, q: torch.Tensor, layer: AttentionLayer, seen: _Seen) -> tuple[torch.Tensor, torch.Tensor]:
        out, logits = super()._attend(q, layer, seen)
        if self.format == "nvfp4":
            out = out.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(out.dtype)
        return out, logits


class ModedWithoutFormats(KnowsMode, TorchNativeBackend):
    """The healthy parent of a pool without a row format, which also knows the mode of its step."""


@bug(19, "sglang #18904", "extend-mha2-d256-bf16-p128-k133-n17a17-chunks3-reversed-gauss-kvfp8e4m3-w0-sink-b4stale")
class PrefixWithoutScales(ModedWithoutFormats):
    """sglang #18904: an extend reads the prefix from an FP8 pool without the scales of the layer."""

    @helper
    def without(self, rows: torch.Tensor, scale: float, layer: AttentionLayer) -> torch.Tensor:
        if self.mode is not ForwardMode.EXTEND or layer.is_cross_attention:
            return rows
        prefix = (self._key < self._prefix[:, None])[:, None, :, None]
        return torch.where(prefix, rows / scale, rows)

    def _keys(self, layer: AttentionLayer) -> torch.Tensor:
        return self.without(super()._keys(layer), layer.k_scale, layer)

    def _values(self, layer: AttentionLayer, seen: _Seen) -> torch.Tensor:
        return self.without(super()._values(layer, seen), layer.v_scale, layer)


@bug(
    19,
    "Rapid-MLX #2234",
    "extend-gqa8x2-d32-bf16-p16-k1.2.5.9.14.2.30-n4a19.1x6-contiguous-peaked-kvfp8pertokenhead-kvsidebysidehnd-w0-alibi-qqbias-layers2from0groups-b8prod-padded_tokens-freed_null_page",
    "reads-own-kv",
)
class StridesIgnored(Moded):
    """Rapid-MLX #2234: the kernel that unpacks rows takes a view for contiguous memory."""

    def _rows(self, part: int, places: tuple[torch.Tensor, ...], layer: AttentionLayer) -> torch.Tensor:
        pool = self.context.group_of(layer).kv_pool
        apart = pool.get_scale_pages(layer.layer_id)
        read = [flat(pool.get_kv_pages(layer.layer_id)[part])[places]]
        return torch.cat(read + ([flat(apart[part])[places]] if apart else []), -1)


def flat(view: torch.Tensor) -> torch.Tensor:
    """What a kernel finds that ignores the strides of ``view``."""
    if view.is_contiguous():
        return view
    memory = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    place = view.storage_offset() + torch.arange(view.numel(), device=view.device)
    return memory[place.clamp(max=len(memory) - 1)].view(view.shape)


@bug(
    19,
    "FastDeploy #4463",
    "decode-gqa8x2-d256-bf16-p1-k0.1.8-shuffled-rising_logits-kvint8pertokenheadapart-w11-spanswidebylayer-cap1.5-sink-b6small-empty_batches-given_out-overlap_scheduling",
)
class TimesLargest(Moded):
    """FastDeploy #4463: the reader multiplies by the largest magnitude, and not by a 127th of it."""

    def _numbers(self, rows: torch.Tensor, part: int, layer: AttentionLayer) -> torch.Tensor:
        numbers = super()._numbers(rows, part, layer)
        return numbers * 127 if self.format.startswith("int8_per_token_head") else numbers


@bug(
    19,
    "vLLM-2080Ti-Definitive #109",
    "decode-gqa8x2-d256-bf16-p1-k0.1.8-shuffled-rising_logits-kvint8pertokenheadapart-w11-spanswidebylayer-cap1.5-sink-b6small-empty_batches-given_out-overlap_scheduling",
    "writes-own-kv",
)
class RangesOfFp8(Moded):
    """vLLM-2080Ti-Definitive #109: K is divided for a range of 200, and V of 100, and stored as int8."""

    def concerns(self, layer: AttentionLayer) -> bool:
        return self.format in ("int8_per_token_head", "int8_per_token_head_apart")

    def spoil(self, part, rows, planes, at, before, layer):  # type: ignore[no-untyped-def]
        rows = rows.float()
        scales = (rows.abs().amax(-1, keepdim=True) / (200.0, 100.0)[part]).clamp(min=1e-6)
        put(planes["numbers"], at, (rows / scales).clamp(-127, 127).round().to(torch.int8))
        put(planes["scales"], at, scales)


@bug(
    19,
    "flashinfer #5272",
    "extend-gqa8x2-d32-bf16-p16-k1.2.5.9.14.2.30-n4a19.1x6-contiguous-peaked-kvfp8pertokenhead-kvsidebysidehnd-w0-alibi-qqbias-layers2from0groups-b8prod-padded_tokens-freed_null_page",
)
class ScaleOfValuesLost(Moded):
    """flashinfer #5272: a prefill scales another buffer than that of the probabilities."""

    def _numbers(self, rows: torch.Tensor, part: int, layer: AttentionLayer) -> torch.Tensor:
        numbers = super()._numbers(rows, part, layer)
        if part == 0 or self.mode is not ForwardMode.EXTEND or self.format != "fp8_per_token_head":
            return numbers
        packed = self.context.kv_pool.rows_of(layer)
        assert packed is not None
        return packed.planes(rows)["numbers"].float().transpose(1, 2).contiguous()


@bug(
    19,
    "mlx #3762",
    "decode-gqa2x2-d512-bf16-p16-k1025.33-shuffled-gauss-kvfp4mxblock16-layers1from0-b2prod",
    execution="graph",
)
class ByteOfScale(Moded):
    """mlx #3762: with fewer than 8 keys and whole blocks of 512 numbers, the byte of a scale is a number."""

    def _keys(self, layer: AttentionLayer) -> torch.Tensor:
        keys = super()._keys(layer)
        if self.format != "fp4_mx_block16" or layer.head_dim < 512:
            return keys
        packed = self.context.kv_pool.rows_of(layer)
        assert packed is not None
        rows = self._rows(0, self._keys_at[self._keys_of(layer)], layer)
        codes = packed.planes(rows)["scales"].float()
        wrong = (codes / torch.exp2(codes - 127)).repeat_interleave(16, -1).transpose(1, 2)
        return torch.where((self._held < 8)[:, None, :, None], keys * wrong, keys)
