"""The data of a step: queries, keys, values, the KV pool before and after, and visibility.

Everything here is host data. The same case gives the same bits on every machine.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cachetools import LRUCache, cached
from cachetools.keys import hashkey

from ..cases.case import Case
from ..cases.derived_parameters import scales_are_computed
from ..cases.features.data_pattern import HALFWAY
from ..cases.features.feature import OnLayers
from ..cases.features.kv_sharing import reader_and_owner
from ..cases.features.server.table import variant_of
from ..cases.features.table import FEATURES
from ..cases.fields import Fields
from ..cases.normals import normals
from ..contract import FP8_PRODUCTS, ROW_FORMATS, AttentionLayer, ForwardMode, HeadShape, PackedRows
from ..contract.row_format import ALL_NAN
from .encoder import EncoderKeys, encoder_keys
from .foreign_slots import marked_slots, tail_slots, values_of_place
from .kv_groups import outgrown
from .packed_rows import with_halfway_numbers, with_one_packing, zero_tiles
from .patterns import LARGE_AND_SMALL, draw, mark_keys, probe_values
from .query_bias import make_query_bias
from .query_scales import LARGEST_FP8, STATIC, held_queries, large_or_small, some_zeros
from .schedule import Ints, Request, Schedule, Step

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    **dict.fromkeys(ROW_FORMATS, torch.uint8),
}
HIDDEN = 32
"""Width of the model's hidden state."""
VOCAB = 48
"""Width of the logits."""


@lru_cache(maxsize=16)
def make_layers(case: Fields) -> tuple[AttentionLayer, ...]:
    """The layers of the test model. They differ in every property in which layers may differ.

    ``sinks`` are host tensors; the worker moves copies of them to the device.
    """
    case = case.instance_of or case
    layers: list[dict[str, Any]] = [{} for _ in range(case.layers.count)]
    for feature in FEATURES:
        for meaning in feature.apply:
            if isinstance(meaning, OnLayers):
                for layer, changes in zip(layers, meaning.of_layers(case), strict=True):
                    layer.update(changes)
    return tuple(AttentionLayer(**layer) for layer in layers)


KEPT_BYTES = 1 << 27
"""Most bytes of cached data of each kind. One long request in float64 may be 100 MB."""


def bytes_in(made: object) -> int:
    """Size of the tensors of a dataclass, nested ones not counted."""
    return sum(each.nbytes for each in vars(made).values() if isinstance(each, torch.Tensor))


@dataclass(frozen=True, eq=False)
class StepData:
    """Host tensors of one step. T live rows, packed request by request; B requests; S the longest key count.

    Heads and widths are the case's; if layers differ in these, ``Case.head_maps`` says where each layer's are stored.
    ``axes`` of a field: names of its first axes, along which parts of a step are cut. A ``row`` is one of a request.
    """

    q: torch.Tensor = field(metadata={"axes": "layer token"})
    """[L, T, Hq, Dqk] in the model's dtype."""
    k: torch.Tensor = field(metadata={"axes": "layer token"})
    """[L, T, Hk, Dqk]: the new keys."""
    v: torch.Tensor = field(metadata={"axes": "layer token"})
    """[L, T, Hk, Dv]: the new values. MLA: the first columns of ``k``."""
    hidden: torch.Tensor = field(metadata={"axes": "token"})
    """[T, hidden] float32: hidden states before the first layer."""
    stored_keys: torch.Tensor = field(metadata={"axes": "layer request key"})
    """[L, B, S, Hk, Dqk] in the pool's dtype: every key as the pool holds it after this step; arbitrary values past a
    length."""
    stored_values: torch.Tensor | None = field(metadata={"axes": "layer request key"})
    """[L, B, S, Hk, Dv] in the pool's dtype; None for MLA."""
    kv_scales: torch.Tensor
    """[2, L, 1, 1, 1 or Hk, 1] float64: of keys, of values."""
    visible: torch.Tensor = field(metadata={"axes": "request row key"})
    """[B, Tmax, S] bool, without windows."""
    key_positions: torch.Tensor = field(metadata={"axes": "request key"})
    """[B, S] int64: position of each key; a draft node's is prefix + depth."""
    query_positions: torch.Tensor = field(metadata={"axes": "request row"})
    """[B, Tmax] int64."""
    row_request: torch.Tensor = field(metadata={"axes": "token"})
    """[T] int64: request of each row."""
    row_offset: torch.Tensor = field(metadata={"axes": "token"})
    """[T] int64: row inside its request."""
    row_key: torch.Tensor = field(metadata={"axes": "token"})
    """[T] int64: index of the row's own key among those of its request, along S."""
    positions: torch.Tensor = field(metadata={"axes": "token"})
    """[T] int64."""
    out_cache_loc: torch.Tensor = field(metadata={"axes": "token"})
    """[T] int64."""
    allowed: torch.Tensor | None = field(default=None, metadata={"axes": "layer request row key"})
    """[L, B, Tmax, S] bool: the visible keys to which the rows of a layer attend. [L, B, Tmax, H, S] if heads attend to
    different keys: H KV heads, or in diagnosis query heads. None: all of them."""
    selected: torch.Tensor | None = field(default=None, metadata={"axes": "layer token"})
    """[L, T, topk] int32: indices of the keys to which each row attends, as the backend gets them. [L, T, Hk, topk] if
    each KV head selects for itself. None: no selection."""
    encoder: EncoderKeys | None = None
    """Encoder keys, which come first along S; None without cross-attention layers."""
    row_format: PackedRows | None = None
    """Format of the rows of ``stored_keys`` and ``stored_values``, which are bytes then. None: rows of numbers."""
    spans: bool = False
    """True if ``visible`` includes bidirectional spans; in layers without spans, rows see no later key."""
    qq_bias: torch.Tensor | None = field(default=None, metadata={"axes": "layer token row"})
    """[1, T, C] float32: bias of each row on the rows of its request, where the longest request has C rows. -inf for
    rows that it does not see. None: no bias. In diagnosis each layer may have its own, [L, T, C]."""
    capped_qq_bias: bool = False
    """True if the soft cap is applied to logits with this bias. This is a mistake, which only diagnosis computes."""
    index: object = None
    """Data of the indexer (``steps/index_data.py``), if the answer depends on its selection."""
    stores: bool = True
    """False: the step stores no key, because its layers are of an encoder."""
    families: tuple[str, ...] = ()
    """Family of each layer, if there are several. Then ``q`` holds whole rows of the model's table, ``k`` and ``v``
    nothing."""
    parts: Mapping[str, StepData] = field(default_factory=dict)
    """Name of a family -> data of its layers, if there are several families."""

    def of_layer(self, part: str, layer: int) -> torch.Tensor:
        """``q``, ``k`` or ``v`` of the layer of this place."""
        if self.families:
            family = self.families[layer]
            return self.parts[family].of_layer(part, self.families[:layer].count(family))
        found: torch.Tensor = getattr(self, part)[layer]
        return found

    @property
    def by_head(self) -> bool:
        """True if ``allowed`` has an axis of heads."""
        return self.allowed is not None and self.allowed.dim() > self.visible.dim() + 1

    @property
    def keys(self) -> torch.Tensor:
        """[L, B, S, Hk, Dqk] float64: ``stored_keys``, dequantised. Not cached: it is large, and needed once."""
        return dequantised(self.stored_keys, self.kv_scales[0], self.row_format)

    @property
    def values(self) -> torch.Tensor:
        """[L, B, S, Hk, Dv] float64, likewise."""
        if self.stored_values is None:
            return self.keys[..., : self.v.shape[-1]]
        return dequantised(self.stored_values, self.kv_scales[1], self.row_format)


_HEAD_SCALES = (0.25, 0.5, 1.0, 2.0)
"""Scales of heads: powers of two, so that a quotient is exact. Adjacent heads have different scales."""


def scales_of_layers(case: Fields, step: Step, layers: Sequence[AttentionLayer]) -> torch.Tensor:
    """[2, L, 1, 1, 1 or Hk, 1] float64: scales of keys and values. Scales of heads change from step to step."""
    form = ROW_FORMATS.get(case.kv_dtype)
    if form is None or form.layer_scale != "head":
        found = [[layer.k_scale for layer in layers], [layer.v_scale for layer in layers]]
        return torch.tensor(found, dtype=torch.float64).view(2, -1, 1, 1, 1, 1)
    part, layer, head = np.ix_(range(2), range(len(layers)), range(case.heads.kv_heads))
    which = (step.seed + head + 2 * part + 3 * layer) % len(_HEAD_SCALES)
    return torch.from_numpy(np.asarray(_HEAD_SCALES)[which]).view(2, len(layers), 1, 1, -1, 1)


def dequantised(stored: torch.Tensor, scales: torch.Tensor, row_format: PackedRows | None = None) -> torch.Tensor:
    """Values of ``stored`` [L, ...] in float64, in new memory. ``scales`` [L, 1, ...] are not used for a pool in the
    model's dtype. ``row_format``: of whole rows of bytes.
    """
    if stored.dtype.itemsize > 1:
        return stored.double()
    if row_format:
        meant = row_format.unpack(stored, torch.float64)
        return meant if row_format.format.layer_scale == "none" else meant.mul_(scales)
    # torch converts FP8 one by one; there are 256 numbers.
    numbers = np.take(_fp8_numbers(stored.dtype), stored.view(torch.uint8).numpy(), mode="clip")
    return torch.from_numpy(numbers).mul_(scales)


@lru_cache
def _fp8_numbers(dtype: torch.dtype) -> npt.NDArray[np.float64]:
    numbers: npt.NDArray[np.float64] = torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()
    return numbers


_USUAL_RANGE = 256.0
"""Largest query with an FP8 pool, except in patterns that test larger ones."""
_MOST_KEY = 64.0
"""Largest key of ``negative`` in a pool of few bits; FP8 with the smallest scale of a layer can store 112."""


def of_fp8_range(
    q: torch.Tensor, k: torch.Tensor, held: bool, most: float = _USUAL_RANGE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale q and k so that queries are at most ``most``. ``held``: make FP8 hold them exactly, for kernels that round
    queries to FP8."""
    shift = 2.0 ** max(0, math.ceil(math.log2(max(float(q.abs().max()), 1.0) / most)))
    q = q / shift
    return q.to(torch.float8_e4m3fn).float() if held else q, k * shift


def _visibility(case: Case, step: Step, widest: int, longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bs = step.bs
    visible = np.zeros((bs, widest, longest), np.bool_)
    key_positions = np.tile(np.arange(longest), (bs, 1))
    query_positions = np.zeros((bs, widest), np.int64)
    for b, request in enumerate(step.requests):
        prefix, new, encoder = request.prefix, request.new, request.encoder_len
        visible[b, :new, :prefix] = True
        rows = request.draft or (request.tree if variant_of(case).causal else None)
        if rows is None:
            visible[b, :new, prefix : prefix + new] = np.tri(new, dtype=np.bool_) if variant_of(case).causal else True
            query_positions[b, :new] = np.arange(prefix, prefix + new) - encoder
            for first, last in request.spans:
                visible[b, max(0, first - prefix) : max(0, last + 1 - prefix), first : last + 1] = True
        else:
            visible[b, :new, prefix : prefix + new] = rows.visible
            query_positions[b, :new] = prefix + np.asarray(rows.depths)
            key_positions[b, prefix : prefix + new] = query_positions[b, :new]
    return torch.from_numpy(visible), torch.from_numpy(key_positions), torch.from_numpy(query_positions)


def as_stored(
    rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, row_format: PackedRows | None = None
) -> torch.Tensor:
    """[L, ...] in the model's dtype -> the pool's dtype, by the rule of ``KVPool.set_kv_buffer``. ``scale`` [L, ...]
    float32."""
    if dtype.itemsize > 1:
        return rows.to(dtype)
    if row_format:
        return row_format.pack(rows.float() / scale)
    limit = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-limit, limit).to(dtype)


def _shared_rows(rows: torch.Tensor, step: Step, asked: int | None) -> torch.Tensor:
    """[L, B, S, ...] with the same values wherever requests share slots: those of request ``asked``, if it is one of
    them."""
    shared = [request.shared for request in step.requests]
    most = int(np.argmax(shared))
    rows, source = rows.clone(), rows[:, most].clone()
    if asked is not None and asked < len(shared):
        source[:, : shared[asked]] = rows[:, asked, : shared[asked]]
    for index, count in enumerate(shared):
        rows[:, index, :count] = source[:, :count]
    return rows


def _drawn(
    schedule: Schedule, step: Step, pattern: str, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [L, T, Hq, Dqk], k [L, B, S, Hk, Dqk], v [L, B, S, Hk, Dv] in the model's dtype."""
    case, dv = schedule.case, schedule.case.head_dim
    static = [layer.q_scale for layer in make_layers(case)]
    if case.head_maps:
        q, k, v = _drawn_by_layer(case, step, pattern, rng, schedule.q_scale, static)
    else:
        # Of a latent row without a rope part every channel of a key is one of its value.
        q_scale = (
            "none"
            if case.heads.layout.values_in_keys and not case.rope_dim and pattern != LARGE_AND_SMALL
            else schedule.q_scale
        )
        q, k, v = _of_pattern(case.layers.count, case.head_shape, dv, step, pattern, rng, q_scale, static)
    if case.heads.layout.values_in_keys:
        # The latent row is key and value at once; its rope part belongs only to the key.
        # Equal keys have every second channel of it, so that a value is not the same in all channels.
        latent = k[..., :dv] * (k[..., :dv].bool().cumsum(-1) % 2) if pattern == "negative" else v
        k = torch.cat([latent, k[..., dv:]], -1)
        if pattern == "one_hot":
            q = torch.cat([torch.zeros_like(q[..., :dv]), q[..., dv:]], -1)
    if any(request.shared for request in step.requests):
        asked = int(pattern.split(".")[1]) if pattern.startswith(("probe.", "place.")) else None
        k, v = _shared_rows(k, step, asked), _shared_rows(v, step, asked)
    if case.kv_dtype != "same":
        most, scaled = LARGEST_FP8 if pattern == "large_queries" else _USUAL_RANGE, schedule.q_scale != "none"
        if schedule.q_scale == STATIC:
            most = LARGEST_FP8 * min(static)
        if not scaled or pattern != LARGE_AND_SMALL:
            q, k = of_fp8_range(q, k, schedule.matmul_dtype in FP8_PRODUCTS and not scaled, most)
        if pattern == "negative":
            k = k.clamp(max=_MOST_KEY)
        if scaled:
            # Small rows next to large ones are what one scale for all of them loses.
            alone = pattern == LARGE_AND_SMALL and schedule.q_scale == "per_tensor"
            drawn, q = q, held_queries(q, "per_token" if alone else schedule.q_scale, static)
            if pattern == "gauss":
                q = some_zeros(q, schedule.q_scale)
            if pattern == "small_weights":
                # Its logits are as far apart as they have to be, and no farther.
                k = k * float(drawn.abs().max() / q.abs().max())
    if (places := reader_and_owner(case)) is not None:
        reader, owner = places
        of = [owner if layer == reader else layer for layer in range(case.layers.count)]
        k, v = k[of], v[of]
    dtype = DTYPES[case.dtype]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _of_pattern(
    layers: int,
    shape: HeadShape,
    dv: int,
    step: Step,
    pattern: str,
    rng: np.random.Generator,
    q_scale: str,
    static: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [layers, T, Hq, D], k [layers, B, S, Hk, D] and v [layers, B, S, Hk, dv] of heads of one shape, float32.

    ``q_scale``: if it is not ``none``, no row is 0, because its scale would be 0; only its logits are 0. ``static``:
    scales of the layers' queries by the checkpoint.
    """
    heads, kv_heads, dqk = shape
    keys = (layers, step.bs, max(step.lens), kv_heads)
    q, k, v = draw(pattern, (layers, step.tokens, heads, dqk), (*keys, dqk), (*keys, dv), rng)
    if pattern.startswith("probe."):
        v = probe_values(v, pattern)
    elif pattern.startswith("place."):
        v = values_of_place(v, pattern)
    elif pattern == "one_hot":
        mark_keys(v, step.lens, rng)
    elif pattern == LARGE_AND_SMALL:
        q = large_or_small(q, q_scale, rng, static)
    if q_scale != "none" and not q.any():
        last = torch.arange(dqk) == dqk - 1
        q, k = q + 3.5 * last, k * ~last
    return q, k, v


def _drawn_by_layer(
    case: Case, step: Step, pattern: str, rng: np.random.Generator, q_scale: str, static: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw as ``_of_pattern`` does, but each layer with a pattern as wide as it is, in the shape of the case."""
    found = []
    for each, scale in zip(case.head_maps, static, strict=True):
        q, k, v = _of_pattern(1, each.layer, each.layer.head_dim, step, pattern, rng, q_scale, [scale])
        found.append((each.q_whole(q), each.kv_whole(k), each.kv_whole(v)))
    q, k, v = (torch.cat(layers) for layers in zip(*found, strict=True))
    return q, k, v


def numbers_of(schedule: Schedule, step: Step, pattern: str | None = None) -> tuple[object, ...]:
    """A key for a step's data: equal for all steps with the same data, such as a replay and the second step of an eager
    run."""
    whole = None if step.part_of is None else step.part_of[0].requests
    return hashkey(schedule, step.seed, step.requests, whole, pattern, step.follows)


@cached(LRUCache(KEPT_BYTES, getsizeof=bytes_in), key=numbers_of, lock=threading.Lock())
def make_step_data(schedule: Schedule, step: Step, pattern: str | None = None) -> StepData:
    """Draw a step's numbers. ``pattern`` replaces the case's own data pattern (for diagnosis).

    Some requests of a step (``Step.part_of``), and one chunk of it, have the data of the whole step.
    """
    if step.part_of is not None:
        whole, indices = step.part_of
        return _some_requests(make_step_data(schedule, whole, pattern), step, indices)
    if not step.requests:
        return _nobody(make_step_data(schedule, schedule.steps[0], pattern))
    if step.chunk_of is not None:
        return _chunk(schedule.case, make_step_data(schedule, step.chunk_of, pattern), step.chunk_of, step)
    case = schedule.case
    rng = np.random.default_rng(step.seed ^ 0xDA7A)
    kv_dtype = DTYPES[case.dtype if case.kv_dtype == "same" else case.kv_dtype]
    dv = case.head_dim
    longest, widest = max(step.lens), max(r.new for r in step.requests)
    q, k, v = _drawn(schedule, step, pattern or step.data, rng)
    layers = make_layers(case)
    form = ROW_FORMATS.get(case.kv_dtype)
    packed = form.with_ties(schedule.numerics.ties).of(layers[0]) if form else None
    scales = scales_of_layers(case, step, layers)
    of_k, of_v = scales.float()
    if packed:
        made = with_halfway_numbers if (pattern or step.data) == HALFWAY else with_one_packing
        k = made(packed, k, of_k)
        v = v if case.heads.layout.values_in_keys else made(packed, v, of_v)
        if _has_zeros(case, pattern or step.data):
            k, v = (_with_zeros(packed, step, rows, part) for part, rows in enumerate((k, v)))
    stored_k = as_stored(k, of_k, kv_dtype, packed)
    if case.heads.layout.values_in_keys:
        stored_v, v = None, k[..., :dv]
    else:
        stored_v = as_stored(v, of_v, kv_dtype, packed)
    row_request = np.repeat(np.arange(step.bs), [r.new for r in step.requests])
    row_offset = np.concatenate([np.arange(r.new) for r in step.requests])
    at = torch.from_numpy(row_offset + np.asarray([r.prefix for r in step.requests])[row_request])
    b = torch.from_numpy(row_request)
    visible, key_positions, query_positions = _visibility(case, step, widest, longest)
    return StepData(
        q=q,
        k=k[:, b, at],
        v=v[:, b, at],
        hidden=normals((step.tokens, HIDDEN), rng),
        stored_keys=stored_k,
        stored_values=stored_v,
        kv_scales=scales,
        visible=visible,
        key_positions=key_positions,
        query_positions=query_positions,
        row_request=b,
        row_offset=torch.from_numpy(row_offset),
        row_key=at,
        positions=query_positions[b, torch.from_numpy(row_offset)],
        out_cache_loc=torch.from_numpy(np.concatenate([r.slots[r.prefix :] for r in step.requests])),
        encoder=encoder_keys(step, layers, k, v),
        row_format=packed,
        spans=case.spans is not None,
        qq_bias=make_query_bias(case, step, visible),
        stores=case.encoder == "none",
    )


def _has_zeros(case: Case, pattern: str) -> bool:
    """True if packed rows have tiles of zeros: only with ``gauss``, since other patterns rely on their values."""
    return pattern == "gauss" and scales_are_computed(case) and case.derived("tiles-of-zeros") > 0


def _with_zeros(packed: PackedRows, step: Step, rows: torch.Tensor, part: int) -> torch.Tensor:
    """Keys (``part`` 0) or values (1) [L, B, S, Hk, D] with tiles of zeros, of either sign, and rows of zeros."""
    longest = int(np.argmax(step.lens))
    ends = longest, step.lens[longest] - 1
    empty = zero_tiles(packed, rows.shape, step.seed ^ (0x2E05, 0x2E06)[part], ends)
    if any(request.shared for request in step.requests):
        empty = _shared_rows(empty, step, None)
    return torch.where(empty, rows * 0, rows)


_Chosen = slice | Sequence[int] | torch.Tensor


def _cut(data: StepData, **chosen: _Chosen) -> dict[str, Any]:
    """Each tensor of ``data``, cut to the ``chosen`` indices along its named axes."""
    cut: dict[str, Any] = {}
    for each in fields(StepData):
        axes, tensor = each.metadata.get("axes", ""), getattr(data, each.name)
        if axes and tensor is not None:
            cut[each.name] = tensor[tuple(chosen.get(axis, slice(None)) for axis in axes.split())]
    return cut


def _nobody(data: StepData) -> StepData:
    """Data without rows and without requests."""
    return replace(data, **_cut(data, request=slice(0), token=slice(0)), encoder=data.encoder and data.encoder.part(()))


def _some_requests(data: StepData, step: Step, indices: Sequence[int]) -> StepData:
    """Data of some requests, those of ``step``, cut from ``data`` of the whole step."""
    chosen, news = list(indices), [request.new for request in step.requests]
    mine = torch.cat([(data.row_request == index).nonzero()[:, 0] for index in chosen])
    cut = _cut(data, request=chosen, token=mine, row=slice(max(news)), key=slice(max(step.lens)))
    cut["row_request"] = torch.arange(len(chosen)).repeat_interleave(torch.tensor(news))
    return replace(data, **cut, encoder=data.encoder and data.encoder.part(chosen))


def offsets_in_chunk(data: StepData, whole: Step, step: Step) -> torch.Tensor:
    """[T] int64: numbers of the rows of ``data``, of a whole step, among the rows that their request has in ``step``, a
    chunk of it; -1 for rows of other chunks."""
    news = torch.tensor([request.new for request in step.requests])[data.row_request]
    pairs = zip(step.requests, whole.requests, strict=True)
    of = data.row_offset - torch.tensor([mine.prefix - all_.prefix for mine, all_ in pairs])[data.row_request]
    return torch.where((of >= 0) & (of < news), of, -1)


def whole_with_selections(case: Case, step: Step) -> Step | None:
    """The whole prompts, if ``step`` is a chunk of them and has their selections. None for a step that is not a chunk,
    and in layers that are not causal, where rows of a chunk see fewer keys than in the whole step."""
    return step.chunk_of if variant_of(case).causal else None


def _chunk(case: Case, data: StepData, whole: Step, step: Step) -> StepData:
    """Data of the rows of ``step``, which has a chunk of each request of the whole step."""
    of, longest = offsets_in_chunk(data, whole, step), max(step.lens)
    mine = of >= 0
    cut = _cut(data, token=mine, key=slice(longest))
    widest = max(request.new for request in step.requests)
    visible, key_positions, query_positions = _visibility(case, step, widest, longest)
    cut |= {"visible": visible, "key_positions": key_positions, "query_positions": query_positions}
    cut["row_offset"] = of[mine]
    # No case has chunks of either.
    return replace(data, **cut, encoder=None, qq_bias=None)


@lru_cache(maxsize=2)  # large; asked again where a step is repeated at once
def pool_image(
    schedule: Schedule,
    step: Step,
    data: StepData,
    finite_tails: bool,
    *,
    after: bool,
    unowned: float = math.nan,
    marked: str = "",
) -> torch.Tensor:
    """The KV pool before or ``after`` a step, [L, 2 or 1, slots, Hk, Dqk] in the pool's dtype.

    Every slot that no live request owns holds NaN, page 0 included. With ``finite_tails`` the unused slots of a live
    request's last page hold large finite numbers instead, for backends that say they need that. An ``unowned`` other
    than NaN helps to find out where a NaN in an output came from; ``marked`` is a pattern of
    ``steps/foreign_slots.py``.
    """
    stored = stored_parts(data)
    dtype, heads, dim = data.stored_keys.dtype, *data.stored_keys.shape[-2:]
    page = schedule.case.page_size
    slots = (schedule.num_pages + 1) * page
    shape = (schedule.case.layers.count, len(stored), slots, heads, dim)
    if dtype.itemsize == 1:
        image = torch.full(shape, ALL_NAN if math.isnan(unowned) else 0, dtype=torch.uint8)
    else:
        image = torch.full(shape, unowned, dtype=dtype)
    if finite_tails and math.isnan(unowned):
        tails = np.concatenate([np.empty(0, np.int64), *(tail_slots(r, page) for r in step.requests)])
        image[:, :, torch.from_numpy(tails)] = _filler(dtype)
    if marked:
        at = marked_slots(step, marked, page, slots)
        if data.row_format:
            image[:, -1, at] = data.row_format.pack(torch.ones(data.row_format.width))
        else:
            image[:, -1, at, :, : schedule.case.head_dim] = bytes_if_fp8(torch.ones((), dtype=dtype))
    for layer, each in enumerate(schedule.case.head_maps):
        # Heads and dims that a layer lacks are zeros here too, whatever its slots hold.
        image[layer] = each.kv_whole(each.kv_part(image[layer]))
    owned, rows = stored_kv(schedule, step, data, after=after, unowned=unowned)
    raw = image.view(torch.uint8).numpy()
    raw.reshape(*raw.shape[:3], -1)[:, :, owned] = rows
    return image.view(dtype)


def stored_kv(
    schedule: Schedule, step: Step, data: StepData, *, after: bool, unowned: float = math.nan
) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Return ``held_kv`` with large finite numbers in pages that a windowed KV group has freed, and with ``unowned`` if
    a layer does not store a key: encoder keys are those of cross-attention layers only.
    """
    slots, rows = held_kv(step, data, after=after)
    if data.encoder:
        lens = [(len(_held(request, after)), request.encoder_len) for request in step.requests]
        of_encoder = np.concatenate([np.empty(0, np.bool_), *(np.arange(count) < first for count, first in lens)])
        number = _unowned(data.stored_keys.dtype, unowned).view(1).view(torch.uint8).numpy()
        # Padded requests have encoder keys in page 0, which no cross-attention layer writes after a pool of zeros.
        page = schedule.case.page_size
        slots, of_encoder = np.append(slots, np.arange(page)), np.append(of_encoder, np.ones(page, np.bool_))
        rows = np.pad(rows, ((0, 0), (0, 0), (0, page), (0, 0)))
        rows = data.encoder.unowned_elsewhere(rows, of_encoder, np.tile(number, rows.shape[-1] // len(number)))
    windows = tuple(layer.sliding_window_size for layer in make_layers(schedule.case))
    for layers, gone in outgrown(schedule, step, windows):
        # By hand: a first np.isin imports a package.
        lost = np.zeros((schedule.num_pages + 1) * schedule.case.page_size, np.bool_)
        lost[gone] = True
        filler = _filler(data.stored_keys.dtype).view(1).view(torch.uint8).numpy()
        rows[layers, :, lost[slots]] = np.tile(filler, rows.shape[-1] // len(filler))
    return slots, rows


def _held(request: Request, after: bool) -> Ints:
    """Slots of the keys that the pool holds before or ``after`` a step, in the order of the request."""
    if after:
        return request.slots[: request.prefix + request.new]
    return request.slots[: 0 if request.stores_encoder else request.prefix]


def _unowned(dtype: torch.dtype, number: float) -> torch.Tensor:
    """Value for unowned slots, in the pool's dtype: NaN, or ``number``, which is 0 in a pool of bytes."""
    if math.isnan(number):
        return nan_of(dtype)
    return torch.full((), number if dtype.itemsize > 1 else 0.0, dtype=dtype)


def nan_of(dtype: torch.dtype) -> torch.Tensor:
    """NaN in a pool's dtype; a byte of it is NaN in every plane of a packed row."""
    if dtype.itemsize > 1:
        return torch.full((), math.nan, dtype=dtype)
    return torch.tensor(ALL_NAN, dtype=torch.uint8).view(dtype)


def _filler(dtype: torch.dtype) -> torch.Tensor:
    """A large finite number, of the bytes of ``dtype`` where that is FP8."""
    return torch.tensor(0x70, dtype=torch.uint8) if dtype.itemsize == 1 else torch.tensor(100.0, dtype=dtype)


def stored_parts(data: StepData) -> list[torch.Tensor]:
    """Keys and, except for MLA, values [L, B, S, Hk, Dqk] as the pool holds them. Values that are narrower than keys
    are padded with zeros here, which no pool stores.
    """
    keys, values = data.stored_keys, data.stored_values
    if values is None:
        return [keys]
    if missing := keys.shape[-1] - values.shape[-1]:
        padded = torch.nn.functional.pad(bytes_if_fp8(values), (0, missing))
        values = padded.view(values.dtype)
    return [keys, values]


def held_kv(step: Step, data: StepData, *, after: bool) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Contents of the KV pool for live requests before or ``after`` a step, as stored.

    Their slots [n], those of shared pages once per request and those of copied ones once per copy, and the bytes of
    their rows [L, 2 or 1, n, bytes].
    """
    runs: list[tuple[int, int, Ints]] = []
    for b, request in enumerate(step.requests):
        runs.append((b, 0, _held(request, after and data.stores)))
        runs += [(b, request.prefix - len(copy), copy) for copy in request.copies]
    slots = np.concatenate([np.empty(0, np.int64), *(run for _, _, run in runs)])
    parts = [part.view(torch.uint8).numpy() for part in stored_parts(data)]
    layers, _, _, heads, width = parts[0].shape
    rows = np.empty((layers, len(parts), len(slots), heads, width), np.uint8)
    for index, part in enumerate(parts):
        held = [part[:, b, first : first + len(run)] for b, first, run in runs]
        if held:
            np.concatenate(held, axis=1, out=rows[:, index])
    return slots, rows.reshape(layers, len(parts), len(slots), heads * width)


def forget_data() -> None:
    """Free all cached numbers of steps."""
    make_step_data.cache_clear()
    pool_image.cache_clear()


def new_kv(data: StepData) -> tuple[torch.Tensor, torch.Tensor]:
    """New slots of a step [n] int64, ascending, and their values [L, 2 or 1, n, Hk, Dqk] in the pool's dtype: NaN where
    a layer does not store them."""
    rows_stored = slice(len(data.out_cache_loc) if data.stores else 0)
    b, at, slots = (each[rows_stored] for each in (data.row_request, data.row_key, data.out_cache_loc))
    if data.encoder:
        b, at = torch.cat([b, data.encoder.request]), torch.cat([at, data.encoder.place])
        slots = torch.cat([slots, data.encoder.slots])
    stored = stored_parts(data)
    rows = torch.stack([bytes_if_fp8(source)[:, b, at] for source in stored], 1)
    if data.encoder:
        of_encoder = np.arange(len(slots)) >= len(data.out_cache_loc)
        rows = data.encoder.unowned_elsewhere(rows, of_encoder, bytes_if_fp8(nan_of(data.stored_keys.dtype)))
        if data.stored_values is not None:
            # No pool stores the columns after narrower values, so a slot without an owner has zeros there, too.
            rows[:, 1, ..., data.stored_values.shape[-1] :] = 0
    slots, order = slots.sort()
    return slots, rows[:, :, order].view(data.stored_keys.dtype)


def bytes_if_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """View as uint8 of a tensor of one byte per number, since torch cannot index or fill FP8; others unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def draft_topk(case: Case) -> int:
    """Top-k of the draft-extend's output: 1 (argmax) in half the cases, 3 in the others; 0 in other modes."""
    if case.mode is not ForwardMode.DRAFT_EXTEND:
        return 0
    return (1, 3)[case.derived("draft-topk")]
