"""The smallest complete backend for KV pools of every row format: values of 8 and 4 bits, and their scales."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..contract import LATENT_FORMATS, ROW_FORMATS, AttentionLayer, BackendContext
from .torch_native import TorchNativeBackend, _Seen

_TIES = {name: "even" for name, each in ROW_FORMATS.items() if each.lets_declare_ties}


class TorchNativeFormatsBackend(TorchNativeBackend):
    """Rows are gathered as bytes and unpacked. ``KVPool.set_kv_buffer`` quantizes them."""

    capabilities = TorchNativeBackend.capabilities.with_changes(
        heads={
            "families": {"mha", "gqa", "mqa"},
            "mla_rope_dims": frozenset(),
            "heads_by_layer": False,
            "gqa_ratios": {1, 2, 4, 8, 16},
        },
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same", *ROW_FORMATS} - LATENT_FORMATS, "ties": _TIES},
        server={"takes_unused_scales": True},
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._is_packed = bool(context.kv_pool.row_format)
        self._has_slot_views &= not self._is_packed

    def _keys(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, C, D] float32, not yet multiplied by ``layer.k_scale``."""
        if not self._is_packed:
            return super()._keys(layer)
        return self._numbers(self._rows(0, self._keys_at[self._keys_of(layer)], layer), 0, layer)

    def _values(self, layer: AttentionLayer, seen: _Seen) -> torch.Tensor:
        """[B, Hk, C, Dv] float32, not yet multiplied by ``layer.v_scale``."""
        if not self._is_packed:
            return super()._values(layer, seen)
        return self._numbers(self._rows(1, seen.values, layer), 1, layer)

    def _rows(self, part: int, places: tuple[torch.Tensor, ...], layer: AttentionLayer) -> torch.Tensor:
        """[B, C, Hk, bytes] uint8: rows of K (0) or V (1) at ``places``, with separate scales."""
        pool = self.context.group_of(layer).kv_pool
        rows = pool.get_kv_pages(layer.layer_id)[part][places]
        apart = pool.get_scale_pages(layer.layer_id)
        return torch.cat([rows, apart[part][places]], -1) if apart else rows

    def _numbers(self, rows: torch.Tensor, part: int, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, C, D] float32: the values that ``rows`` encode, multiplied by scales of heads, if there are any."""
        packed = self.context.kv_pool.rows_of(layer)
        assert packed is not None
        numbers = packed.unpack(rows)
        by_head = (layer.k_head_scales, layer.v_head_scales)[part]
        if by_head is not None:
            numbers = numbers * by_head[:, None]
        return numbers.transpose(1, 2).contiguous()

    def _attend(self, q: torch.Tensor, layer: AttentionLayer, seen: _Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """Ignore a checkpoint's scales if the pool holds K and V unscaled."""
        if self.context.kv_pool.dtype == q.dtype:
            layer = replace(layer, k_scale=1.0, v_scale=1.0)
        return super()._attend(q, layer, seen)
