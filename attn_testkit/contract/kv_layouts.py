"""Layouts of K and V in the memory of a KV pool: named layouts, and custom ones that a backend describes.

In every layout K and V are found by slot, in a view of any number of dimensions. Its indices, in row-major order, count
slots first, then heads, then the elements of a row. ``[slots, H, D]`` is such a view, and so are ``[pages, page_size,
H, D]`` of a pool with heads first, and ``[pages, page_size, H, D / 8, 8]`` of one that keeps keys in pieces of 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .layer import AttentionLayer
from .row_format import PackedRows, RowFormat

__all__ = [
    "KV_LAYOUTS", "OWN", "KVLayer", "KVPoolSpec", "between", "lay_out", "pieces_of", "place_of", "refuse_layers",
    "slot_dims",
]  # fmt: skip

_ORDERS: Mapping[str, tuple[str, ...]] = {
    "nhd": ("layer", "part", "page", "slot", "head", "dim"),
    "hnd": ("layer", "part", "page", "head", "slot", "dim"),
    "kv-in-block": ("layer", "page", "part", "slot", "head", "dim"),
    "side-by-side": ("layer", "page", "slot", "head", "part", "dim"),
    "side-by-side-hnd": ("layer", "page", "head", "slot", "part", "dim"),
    "layers-in-block": ("page", "layer", "part", "slot", "head", "dim"),
    "padded-pages": ("layer", "part", "page", "gap", "slot", "head", "dim"),
}
"""Layout -> the order of its axes, the outermost first. ``part``: K or V. ``gap``: the axes inside it are followed by
unused memory, of the size of a row of all heads."""
OWN = "custom"
"""Name of the custom layout, which the backend allocates: ``AttentionBackend.lay_out_kv_pool``."""
KV_LAYOUTS = (*_ORDERS, OWN)


@dataclass(frozen=True)
class KVPoolSpec:
    """The size of a pool, for the code that allocates it."""

    pages: int
    """Number of pages, page 0 included."""
    page_size: int
    """Slots per page. Slot s is slot ``s % page_size`` of page ``s // page_size``."""
    layers: tuple[AttentionLayer, ...]
    dtype: torch.dtype
    device: torch.device
    cleared: bool = True
    """True if memory has to be zeroed."""
    row_format: RowFormat | None = None
    """Format of a row, if it holds more than numbers of ``dtype``, which is then uint8."""

    @property
    def num_slots(self) -> int:
        """All slots, page 0 included."""
        return self.pages * self.page_size

    def rows_of(self, layer: AttentionLayer) -> PackedRows | None:
        """The packed rows of a layer; None if its rows are plain numbers."""
        return self.row_format.of(layer) if self.row_format else None

    def row_width(self, layer: AttentionLayer) -> int:
        """Elements of a row of one head, without separate scales: of a key, or of a row that holds key and value."""
        rows = self.rows_of(layer)
        return rows.nbytes - rows.nbytes_apart if rows else layer.head_dim

    def width_apart(self, layer: AttentionLayer) -> int:
        """Bytes of the separate scales of a row of one head; 0 if the scales are not separate."""
        rows = self.rows_of(layer)
        return rows.nbytes_apart if rows else 0

    def part_widths(self, layer: AttentionLayer) -> tuple[int, ...]:
        """Elements of a row of one head in each part: K and V, or the row that holds both."""
        key = self.row_width(layer)
        if layer.head_layout.pool_rows == 1:
            return (key,)
        return key, key if self.row_format else layer.v_head_dim


@dataclass(frozen=True, eq=False)
class KVLayer:
    """Views of the keys and values of one layer."""

    key: torch.Tensor
    """A view of K that counts slots, heads and the numbers of a row (see the module), in the pool's dtype, any
    strides."""
    value: torch.Tensor | None = None
    """The same view of V. None for MLA, whose values are the first columns of the keys."""
    buffer: torch.Tensor | None = None
    """Memory of both in the shape that the kernel expects; ``KVPool.get_layer_buffer`` returns it."""
    scales: tuple[torch.Tensor, ...] = ()
    """Views of the scales of K and of V that count slots, heads and bytes of a row's scales, uint8, in separate memory
    or after the numbers of a page. Empty if the rows have no separate scales."""

    @property
    def every(self) -> tuple[torch.Tensor, ...]:
        """Each view: rows of K, their scales if these are separate, then the same of V."""
        if not self.scales:
            return self.parts
        return tuple(view for pair in zip(self.parts, self.scales, strict=True) for view in pair)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Keys and, except for MLA, values."""
        return (self.key,) if self.value is None else (self.key, self.value)


def lay_out(spec: KVPoolSpec, layout: str, make: Callable[..., torch.Tensor] | None = None) -> tuple[KVLayer, ...]:
    """Allocate memory in a layout that has a name: one piece for all layers with the same head shape.

    ``make``: allocates each piece, as ``torch.zeros(shape, dtype=, device=)`` does.
    Raises ``ValueError`` for an unknown name.
    """
    if layout not in _ORDERS:
        raise ValueError(f"no KV layout is called {layout!r}; there are: {', '.join(_ORDERS)}")
    make = make or (torch.zeros if spec.cleared else torch.empty)
    if any(len(set(spec.part_widths(layer))) > 1 for layer in spec.layers):
        if layout != "nhd":
            raise ValueError(f"the KV layout {layout!r} has K and V of one width; keys wider than values need 'nhd'")
        return _apart(spec, make)
    found: dict[int, KVLayer] = {}
    for shape in dict.fromkeys((layer.tp_k_head_num, layer.head_dim) for layer in spec.layers):
        alike = [layer for layer in spec.layers if (layer.tp_k_head_num, layer.head_dim) == shape]
        own, order = replace(spec, layers=tuple(alike)), _ORDERS[layout]
        if spec.row_format and spec.row_format.page_multiple:
            laid = _scales_after_numbers(own, order, spec.row_format, make)
            found.update(zip((layer.layer_id for layer in alike), laid, strict=True))
            continue
        laid = _lay_out(own, order, spec.row_width(alike[0]), make)
        if apart := spec.width_apart(alike[0]):
            laid = [
                replace(rows, scales=scales.parts)
                for rows, scales in zip(laid, _lay_out(own, order, apart, make), strict=True)
            ]
        found.update(zip((layer.layer_id for layer in alike), laid, strict=True))
    return tuple(found[layer.layer_id] for layer in spec.layers)


def _apart(spec: KVPoolSpec, make: Callable[..., torch.Tensor]) -> tuple[KVLayer, ...]:
    """Allocate K and V of each layer separately, as servers do whose values are narrower than keys."""

    def part(layer: AttentionLayer, width: int) -> torch.Tensor:
        shape = spec.pages, spec.page_size, layer.tp_k_head_num, width
        return make(shape, dtype=spec.dtype, device=spec.device)

    found = []
    for layer in spec.layers:
        key, *value = (part(layer, width) for width in spec.part_widths(layer))
        found.append(KVLayer(key, value[0] if value else None))
    return tuple(found)


def _lay_out(spec: KVPoolSpec, order: Sequence[str], width: int, make: Callable[..., torch.Tensor]) -> list[KVLayer]:
    """Allocate layers of one shape, with rows of ``width`` elements."""
    first = spec.layers[0]
    sizes = {
        "layer": len(spec.layers), "part": first.head_layout.pool_rows, "page": spec.pages, "slot": spec.page_size,
        "head": first.tp_k_head_num, "dim": width,
    }  # fmt: skip
    strides, end = dict[str, int](), 1
    for axis in reversed(order):
        if axis == "gap":
            end += sizes["head"] * sizes["dim"]
        else:
            strides[axis], end = end, end * sizes[axis]
    memory = make(end, dtype=spec.dtype, device=spec.device)

    def view(axes: Sequence[str], first: int) -> torch.Tensor:
        return memory.as_strided([sizes[axis] for axis in axes], [strides[axis] for axis in axes], first)

    own = [axis for axis in order if axis not in ("layer", "gap")]
    found = []
    for start in range(0, sizes["layer"] * strides["layer"], strides["layer"]):
        key, *value = (
            view(("page", "slot", "head", "dim"), start + part * strides["part"]) for part in range(sizes["part"])
        )
        found.append(KVLayer(key, value[0] if value else None, view(own, start)))
    return found


def _scales_after_numbers(
    spec: KVPoolSpec, order: Sequence[str], form: RowFormat, make: Callable[..., torch.Tensor]
) -> list[KVLayer]:
    """Allocate layers whose pages hold a row of numbers for each slot, then a row of scales for each slot, then unused
    memory up to ``RowFormat.page_bytes``. A slot has one row for all heads."""
    inside, apart = spec.row_width(spec.layers[0]), spec.width_apart(spec.layers[0])
    page = form.page_bytes(spec.page_size * (inside + apart))
    step = page + form.page_multiple * ("gap" in order)
    by_layer = order.index("layer") < order.index("page")
    of_layer, of_page = (spec.pages * step, step) if by_layer else (step, len(spec.layers) * step)
    memory = make(len(spec.layers) * spec.pages * step, dtype=spec.dtype, device=spec.device)

    def view(layer: int, first: int, width: int) -> torch.Tensor:
        shape, strides = (spec.pages, spec.page_size, 1, width), (of_page, width, width, 1)
        return memory.as_strided(shape, strides, layer * of_layer + first)

    return [
        KVLayer(
            view(layer, 0, inside),
            buffer=memory.as_strided((spec.pages, page), (of_page, 1), layer * of_layer),
            scales=(view(layer, spec.page_size * inside, apart),),
        )
        for layer in range(len(spec.layers))
    ]


def slot_dims(view: torch.Tensor, slots: int) -> int:
    """Number of leading dimensions of a view of ``KVLayer`` that count slots; 0 if none do."""
    return next((n for n in range(1, view.dim() + 1) if math.prod(view.shape[:n]) == slots), 0)


def place_of(slots: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Indices of slots [n] int64 in the dimensions that count slots, which have these sizes. Device work only."""
    if len(sizes) == 1:
        return (slots,)
    inner = math.prod(sizes[1:])
    return (slots // inner, *place_of(slots % inner, sizes[1:]))


def refuse_layers(spec: KVPoolSpec, layers: object) -> tuple[KVLayer, ...]:
    """Return ``layers`` unchanged if the kit can find every slot of them and no two numbers share memory.

    Raises ``ValueError`` that says which view is wrong, what was expected and what to do.
    """
    if not isinstance(layers, (tuple, list)) or not all(type(each) is KVLayer for each in layers):
        raise ValueError(f"lay_out_kv_pool must return a list of KVLayer, one per layer; it returned {layers!r}"[:200])
    if len(layers) != len(spec.layers):
        raise ValueError(f"lay_out_kv_pool returned {len(layers)} KVLayers for {len(spec.layers)} layers")
    for layer, found in zip(spec.layers, layers, strict=True):
        if (found.value is None) != layer.head_layout.values_in_keys:
            has = "has no values; give a view of them" if found.value is None else "is MLA: leave value out"
            raise ValueError(f"lay_out_kv_pool: layer {layer.layer_id} {has}")
        apart = spec.width_apart(layer)
        if len(found.scales) != (len(found.parts) if apart else 0):
            raise ValueError(
                f"lay_out_kv_pool: layer {layer.layer_id} has {len(found.scales)} separate views of scales; "
                + (f"give scales=(of K, of V), {apart} bytes per row" if apart else "its rows have none: leave it out")
            )
        views = list(zip(("keys", "values"), found.parts, spec.part_widths(layer), strict=False))
        views += [(f"scales of {name}", view, apart) for name, view in zip(("K", "V"), found.scales, strict=False)]
        for name, view, width in views:
            wrong = _wrong(spec, layer, view, None if name.startswith("scales") else found.buffer, width)
            if wrong:
                raise ValueError(f"lay_out_kv_pool: the {name} of layer {layer.layer_id} {wrong}")
    for memory, inside in pieces_of([view for each in layers for view in each.every]):
        if int(between(memory, inside).sum()) + sum(view.numel() for view in inside) == memory.numel():
            continue
        raise ValueError(
            "lay_out_kv_pool: two values of the pool share one address; every slot of every layer needs memory of "
            "its own for K and for V"
        )
    return tuple(layers)


def _wrong(spec: KVPoolSpec, layer: AttentionLayer, view: object, buffer: torch.Tensor | None, width: int) -> str:
    """Text about a mistake in a view of rows of ``width`` elements, and the remedy; empty if there is no mistake."""
    heads = layer.tp_k_head_num
    if type(view) is not torch.Tensor:
        return f"are not a plain torch.Tensor: {view!r}"[:200]
    if view.dtype != spec.dtype or view.device.type != spec.device.type:
        return f"are {view.dtype} on {view.device}; the pool is {spec.dtype} on {spec.device}"
    leading = slot_dims(view, spec.num_slots)
    row = view.shape[leading:]
    counted = any(math.prod(row[:n]) == heads for n in range(len(row) + 1))
    if not leading or math.prod(row) != heads * width or not counted:
        return (
            f"have shape {list(view.shape)}; expected are dimensions that count {spec.num_slots} slots, then {heads} "
            f"heads of {width}, such as {[spec.pages, spec.page_size, heads, width]}: transpose the view, without a "
            "copy"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(view.shape, view.stride(), strict=True)):
        return f"have a stride of 0 ({list(view.stride())}): an expanded view has one row for many slots"
    if view.untyped_storage().nbytes() % spec.dtype.itemsize:
        return f"lie in {view.untyped_storage().nbytes()} bytes, which are not a whole number of {spec.dtype}"
    if buffer is not None and buffer.untyped_storage().data_ptr() != view.untyped_storage().data_ptr():
        return "are not in the layer's buffer: reshape, contiguous and indexing copy; take view, transpose and slices"
    return ""


def pieces_of(views: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Each allocation that the views point into, flat, [n] of their dtype, with the views in it."""
    pieces: dict[int, list[torch.Tensor]] = {}
    for view in views:
        pieces.setdefault(view.untyped_storage().data_ptr(), []).append(view)
    return [(_whole(inside[0]), inside) for inside in pieces.values()]


def between(memory: torch.Tensor, views: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n] bool: True for numbers of ``memory`` [n] that none of the views in it holds. Device work only."""
    free = torch.ones(memory.numel(), dtype=torch.bool, device=memory.device)
    for view in views:
        free.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return free


def _whole(view: torch.Tensor) -> torch.Tensor:
    return view.as_strided((view.untyped_storage().nbytes() // view.dtype.itemsize,), (1,), 0)
