"""The paged KV memory that servers share between requests."""

from __future__ import annotations

import torch

from .layer import AttentionLayer

__all__ = ["KVPool"]


class _ById(dict[int, torch.Tensor]):
    def __missing__(self, layer_id: int) -> torch.Tensor:
        raise KeyError(f"the KV pool has no layer of id {layer_id}; it has {', '.join(map(str, self))}")


class KVPool:
    """K and V of every token slot, for every layer. Layers are asked for by their ids, which need not begin at 0.

    ``size`` token slots follow page 0. Page 0 is reserved: padded rows write there, and no live request owns a slot of
    it. A slot ``s`` lies in page ``s // page_size``; inside a page the slots are consecutive.

    MHA, GQA, MQA: K is [slots, Hk, D] and V is [slots, Hk, Dv] per layer, with ``slots = page_size + size``. MLA: one
    buffer [slots, 1, kv_lora_rank + rope] per layer; the value buffer is a view of its first ``kv_lora_rank`` columns.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        layers: tuple[AttentionLayer, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate zeroed memory.

        ``size`` is in slots and a multiple of ``page_size``, and ``v_head_dim`` equals ``head_dim`` but for MLA, else
        ``ValueError``. All layers have the head layout of the first.
        """
        if size % page_size:
            raise ValueError(f"a KV pool of {size} slots is not a whole number of {page_size}-slot pages")
        self.size, self.page_size, self.dtype = size, page_size, dtype
        self.device = torch.device(device)
        self.layers = layers
        first = layers[0]
        self.is_mla = first.is_mla
        slots = size + page_size
        # One allocation for all layers, K beside V, so that the kit can compare the whole pool in one look. A layer's
        # buffers are contiguous views, as a backend would get them from a server.
        if self.is_mla:
            self.storage = torch.zeros(len(layers), 1, slots, 1, first.head_dim, dtype=dtype, device=device)
        else:
            if first.v_head_dim != first.head_dim:
                raise ValueError("this pool keeps K and V in one allocation and needs v_head_dim == head_dim")
            self.storage = torch.zeros(
                len(layers), 2, slots, first.tp_k_head_num, first.head_dim, dtype=dtype, device=device
            )

        # A server gives the same buffers at every call.
        parts, ids = self.storage.shape[1], [layer.layer_id for layer in layers]
        flat = self.storage.flatten(0, 1).unbind(0)
        self._buffers = tuple(_ById(zip(ids, flat[part::parts], strict=True)) for part in range(parts))
        self._row = tuple(self.storage.shape[3:])

    @property
    def num_slots(self) -> int:
        """All slots, page 0 included."""
        return self.size + self.page_size

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """[slots, Hk, D] (MLA: [slots, 1, kv_lora_rank + rope]) in the pool's dtype. A view, not a copy.

        Raises ``KeyError`` that names the ids there are, as do the other methods.
        """
        return self._buffers[0][layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """[slots, Hk, Dv] (MLA: the first ``kv_lora_rank`` columns of the key buffer). A view, not a copy."""
        if self.is_mla:
            return self._buffers[0][layer_id][..., : self.layers[0].kv_lora_rank]
        return self._buffers[1][layer_id]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key [slots, Hk, D] and value [slots, Hk, Dv] buffer of a layer. Views, not copies."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(
        self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None
    ) -> None:
        """Write new rows into their slots; device work only, so it may be captured.

        ``loc`` [T] int64 or int32: slots, as in ``out_cache_loc``. ``k`` [T, Hk, D], ``v`` [T, Hk, Dv] in the model's
        dtype; ``v`` is ignored for MLA. In an FP8 pool the rows are divided by ``layer.k_scale`` / ``layer.v_scale``
        and clamped to the largest FP8 value. Raises ``ValueError`` when a pool that is not MLA gets no ``v``.
        """
        slots = loc.long()
        self._put(self._buffers[0][layer.layer_id], slots, k, layer.k_scale)
        if not self.is_mla:
            if v is None:
                raise ValueError("a pool that is not MLA needs v as well as k")
            self._put(self._buffers[1][layer.layer_id], slots, v, layer.v_scale)

    def _put(self, buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
        shape = rows.shape
        if shape[1:] != self._row:
            rows = rows.reshape(shape[0], *self._row)
        if self.dtype.itemsize == 1:
            limit = torch.finfo(self.dtype).max
            rows = (rows.float() / scale).clamp(-limit, limit).to(self.dtype)
            # index_put is not implemented for FP8 everywhere; the bytes are what is stored.
            buffer, rows = buffer.view(torch.uint8), rows.view(torch.uint8)
        elif rows.dtype != self.dtype:
            rows = rows.to(self.dtype)
        buffer.index_put_((slots,), rows)
