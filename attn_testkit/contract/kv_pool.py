"""The paged KV memory that servers share between requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import torch

from .kv_layouts import OWN, KVLayer, KVPoolSpec, lay_out, pieces_of, place_of, refuse_layers, slot_dims
from .layer import AttentionLayer
from .row_format import ROW_FORMATS, PackedRows

__all__ = ["KVPool"]


_Of = TypeVar("_Of")


class _ById(dict[int, _Of]):
    def __missing__(self, layer_id: int) -> _Of:
        raise KeyError(f"the KV pool has no layer of id {layer_id}; it has {', '.join(map(str, self))}")


class KVPool:
    """K and V of every token slot, for every layer. Layers are addressed by their ids, which need not begin at 0.

    ``size`` token slots follow page 0. Page 0 is reserved: padded rows write there, and no live request owns a slot of
    it. A slot ``s`` is in page ``s // page_size``; inside a page the slots are consecutive.

    MHA, GQA, MQA: K and V of a slot are [Hk, D] and [Hk, Dv] per layer. MLA: one row [1, kv_lora_rank + rope] per
    layer; the value is its first ``kv_lora_rank`` columns. ``layout`` is their order in memory:

    ==================== ==================================================== ========================================
    ``layout``           ``get_layer_buffer``                                 remark
    ==================== ==================================================== ========================================
    ``nhd``              [2, pages, page_size, Hk, D]                         K and V are contiguous by slot
    ``hnd``              [2, pages, Hk, page_size, D]                         heads before slots: no view by slot
    ``kv-in-block``      [pages, 2, page_size, Hk, D]                         K and V of a page are one block
    ``side-by-side``     [pages, page_size, Hk, 2, D]                         K and V of a head share a row of 2 * D
    ``side-by-side-hnd`` [pages, Hk, page_size, 2, D]                         both of the above, as vLLM has it
    ``layers-in-block``  [pages, 2, page_size, Hk, D], strided                a page of all layers is one block
    ``padded-pages``     [2, pages, page_size, Hk, D], strided                each page is followed by unused memory
    ``custom``           ``buffer`` of ``AttentionBackend.lay_out_kv_pool``   the backend's
    ==================== ==================================================== ========================================

    (MLA: 1 instead of 2.) ``get_kv_pages`` works in all of them, for kernels that take strides. If layers differ in
    their heads, Hk and D are the layer's own, and layers of one shape are adjacent.

    In a pool with a ``row_format`` a row is bytes: D and Dv are the bytes of a row, the dtype is uint8, and of MLA the
    value buffer is the key buffer. ``rows_of`` has the planes of a row, and ``get_planes`` views of them. Separate
    scales do not count in D and Dv: they are stored in separate memory, in the same order of axes. If
    ``RowFormat.page_multiple`` is not 0, a page has the scales of its slots after all their numbers, and
    ``get_layer_buffer`` is [pages, bytes of a page] uint8, strided where the layout has more memory between pages.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        layers: tuple[AttentionLayer, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        layout: str = "nhd",
        own: Callable[[KVPoolSpec], Sequence[KVLayer]] | None = None,
        *,
        cleared: bool = True,
        row_format: str = "",
        make: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        """Allocate memory, zeroed unless ``cleared`` is False.

        ``size`` is in slots and a multiple of ``page_size``, and ``layout`` is a name of the table, else
        ``ValueError``; for keys wider than values it is ``nhd``. If ``layout`` is ``custom``, the function ``own``
        allocates; its result is checked, and ``ValueError`` says what is wrong with it. ``row_format``: a name of
        ``ROW_FORMATS``, with ``dtype`` uint8; empty for rows of numbers. ``make``: allocates memory of named
        layouts, as ``torch.zeros(shape, dtype=, device=)`` does.
        """
        if size % page_size:
            raise ValueError(f"a KV pool of {size} slots is not a whole number of {page_size}-slot pages")
        self.size, self.page_size, self.dtype = size, page_size, dtype
        self.device = torch.device(device)
        self.layers, self.layout, self.own = layers, layout, own
        self.one_row = bool(layers) and layers[0].head_layout.values_in_keys
        """MLA: a slot holds one row per layer, which is key and value."""
        self.row_format = row_format
        """Name of the format of a row; empty for numbers of ``dtype``."""
        form = ROW_FORMATS[row_format] if row_format else None
        owners = tuple(layer for layer in layers if layer.kv_sharing_target_layer_id < 0)
        self.spec = spec = KVPoolSpec(size // page_size + 1, page_size, owners, dtype, self.device, cleared, form)
        if layout == OWN:
            if own is None:
                raise ValueError("the backend lays out a pool of layout 'custom': give its lay_out_kv_pool as `own`")
            found = refuse_layers(spec, own(spec))
        else:
            found = lay_out(spec, layout, make)
        own_memory = dict(zip((layer.layer_id for layer in owners), found, strict=True))
        targets = {layer.layer_id: layer.kv_sharing_target_layer_id for layer in layers}
        self.memory = _ById((own, own_memory[own if target < 0 else target]) for own, target in targets.items())
        """Layer id -> views of its K and V, in the order of ``layers``. Layers that share KV have the same views."""
        # Made at the first request; a server gives the same buffers at every call.
        self._by_slot: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}
        self._by_page: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}
        self._stored: dict[int, list[tuple[torch.Tensor, tuple[int, ...]]]] = {}

    @cached_property
    def pieces(self) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """All memory of K and V: each allocation, flat, and the views in it."""
        return pieces_of([part for each in self.memory.values() for part in each.every])

    def _where_stored(self, layer_id: int) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        """Views of K and V that rows are stored through, each with the sizes of its dimensions that count slots; then
        those of separate scales."""
        views = self._views(layer_id, self.num_slots) or self.memory[layer_id].parts
        if self.one_row:
            views = views[:1]
        return [
            (view, tuple(view.shape[: slot_dims(view, self.num_slots)]))
            for view in (*views, *self.memory[layer_id].scales)
        ]

    def _views(self, layer_id: int, *slots: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Views of K and V [*slots, H, D]; None if they would need a copy."""
        parts = self.memory[layer_id].parts
        layer = next(layer for layer in self.layers if layer.layer_id == layer_id)
        try:
            widths = self.spec.part_widths(layer)
            views = [part.view(*slots, layer.tp_k_head_num, width) for part, width in zip(parts, widths, strict=True)]
        except RuntimeError:
            return None
        if self.row_format and self.one_row:
            return views[0], views[0]
        return views[0], views[0][..., : layer.kv_lora_rank] if self.one_row else views[1]

    def rows_of(self, layer: AttentionLayer) -> PackedRows | None:
        """The format of a layer's rows: planes, packing, meaning. None for rows of numbers."""
        return self.spec.rows_of(layer)

    def get_planes(self, layer_id: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Planes of K and of V by name, [pages, page_size, Hk, numbers] each: views, wherever the scales are stored.

        Two FP4 numbers are a byte, and a scale that is an exponent is one too; other planes have their dtype. Raises
        ``ValueError`` if rows are not packed ones of K and V, or no strides give such views of a custom layout.
        """
        layer = next(layer for layer in self.layers if layer.layer_id == layer_id)
        packed = self.rows_of(layer)
        if packed is None or self.one_row:
            raise ValueError(f"rows of the KV pool have no planes of K and V: row_format is {self.row_format!r}")
        pages, apart = self.get_kv_pages(layer_id), self.get_scale_pages(layer_id)
        k, v = (packed.planes_of(rows, apart[part] if apart else None) for part, rows in enumerate(pages))
        return k, v

    def get_scale_pages(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """Bytes of the separate scales of K and of V, [pages, page_size, Hk, bytes] uint8 each: views. Empty if there
        are none. Raises ``ValueError`` if no strides give such views of a custom layout."""
        found = self.memory[layer_id].scales
        if not found:
            return ()
        layer = next(layer for layer in self.layers if layer.layer_id == layer_id)
        shape = self.num_slots // self.page_size, self.page_size, layer.tp_k_head_num, self.spec.width_apart(layer)
        try:
            return tuple(each.view(shape) for each in found)
        except RuntimeError:
            raise ValueError(f"scales of layer {layer_id} have no view [pages, page_size, heads, bytes]") from None

    @property
    def num_slots(self) -> int:
        """All slots, page 0 included."""
        return self.size + self.page_size

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """[slots, Hk, D] (MLA: [slots, 1, kv_lora_rank + rope]) in the pool's dtype. A view, not a copy.

        Raises ``KeyError`` that names the existing ids, as do the other methods.
        """
        return self.get_kv_buffer(layer_id)[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """[slots, Hk, Dv] (MLA: the first ``kv_lora_rank`` columns of the key buffer). A view, not a copy."""
        return self.get_kv_buffer(layer_id)[1]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key [slots, Hk, D] and value [slots, Hk, Dv] buffer of a layer. Views, not copies.

        The view is strided in all layouts but ``nhd``. Raises ``ValueError`` for layouts that cannot be viewed this
        way: heads-first pages with several slots, all layers in one block, or padded slots.
        """
        if layer_id not in self._by_slot:
            self._by_slot[layer_id] = self._views(layer_id, self.num_slots)
        return self._there(self._by_slot[layer_id], "[slots, heads, width]")

    def get_kv_pages(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K [pages, page_size, Hk, D] and V [pages, page_size, Hk, Dv] of a layer, of any strides. Views, not copies.
        Kernels for ``hnd`` use their ``transpose(1, 2)``. Raises ``ValueError`` if no strides give such a view of a
        custom layout.
        """
        if layer_id not in self._by_page:
            self._by_page[layer_id] = self._views(layer_id, self.num_slots // self.page_size, self.page_size)
        return self._there(self._by_page[layer_id], "[pages, page_size, heads, width]")

    def get_layer_buffer(self, layer_id: int) -> torch.Tensor:
        """K and V of a layer in the shape of their layout (table above). Raises ``ValueError`` if there is no
        buffer."""
        buffer = self.memory[layer_id].buffer
        if buffer is None:
            raise ValueError(f"lay_out_kv_pool gave no buffer for layer {layer_id}: KVLayer(key, value, buffer=...)")
        return buffer

    def _there(self, views: tuple[torch.Tensor, torch.Tensor] | None, shape: str) -> tuple[torch.Tensor, torch.Tensor]:
        if views is None:
            raise ValueError(
                f"a KV pool of layout {self.layout!r} with {self.page_size}-slot pages has no view {shape}: use "
                "get_kv_pages or get_layer_buffer"
            )
        return views

    def set_kv_buffer(
        self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None
    ) -> None:
        """Write new rows into their slots; device work only, so it may be captured.

        ``loc`` [T] int64 or int32: slots, as in ``out_cache_loc``. ``k`` [T, Hk, D], ``v`` [T, Hk, Dv] in the model's
        dtype; ``v`` is ignored for MLA. In an FP8 pool the rows are divided by ``layer.k_scale`` / ``layer.v_scale``
        and clamped to the largest FP8 value; with a ``row_format`` they are divided by the layer's scales, if it has
        any, and packed. Raises ``ValueError`` when a pool
        that is not MLA gets no ``v``.
        """
        slots, stored = loc.long(), self._stored.get(layer.layer_id)
        if stored is None:
            stored = self._stored[layer.layer_id] = self._where_stored(layer.layer_id)
        packed = self.rows_of(layer)
        given = [(k, layer.k_scale, layer.k_head_scales)]
        if not self.one_row:
            if v is None:
                raise ValueError("a pool that is not MLA needs v as well as k")
            given.append((v, layer.v_scale, layer.v_head_scales))
        for part, (rows, scale, by_head) in enumerate(given):
            if packed is None:
                self._put(stored[part], slots, rows, scale)
                continue
            rows = packed.pack(packed.divided(rows.reshape(-1, layer.tp_k_head_num, layer.head_dim), scale, by_head))
            inside = packed.nbytes - packed.nbytes_apart
            self._put(stored[part], slots, rows[..., :inside], 1.0)
            if packed.nbytes_apart:
                self._put(stored[len(given) + part], slots, rows[..., inside:], 1.0)

    def _put(
        self, where: tuple[torch.Tensor, tuple[int, ...]], slots: torch.Tensor, rows: torch.Tensor, scale: float
    ) -> None:
        buffer, sizes = where
        shape, row = rows.shape, buffer.shape[len(sizes) :]
        if shape[1:] != row:
            rows = rows.reshape(shape[0], *row)
        if self.dtype.is_floating_point and self.dtype.itemsize == 1:
            limit = torch.finfo(self.dtype).max
            rows = (rows.float() / scale).clamp(-limit, limit).to(self.dtype)
            # index_put is not implemented for FP8 everywhere; the bytes are what is stored.
            buffer, rows = buffer.view(torch.uint8), rows.view(torch.uint8)
        elif rows.dtype != self.dtype:
            rows = rows.to(self.dtype)
        buffer.index_put_(place_of(slots, sizes), rows)
