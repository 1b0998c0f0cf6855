"""Healthy backends of encoder-decoder models: one plan for the decoder's own keys, and one for those of the encoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from typing_extensions import override

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    CrossAttention,
    ForwardBatch,
    ForwardMode,
)

from .grouped import GroupedBackend
from .parent import Metadata, PlannedBackend

MODES = (ForwardMode.DECODE, ForwardMode.EXTEND)
_LAYERS = CrossAttention(frozenset(MODES), frozenset({"first", "own_group"}))


class EncoderKeys(PlannedBackend):
    """Child of the cross-attention layers: all keys of the encoder, which are stored only in the first step."""

    capabilities = PlannedBackend.capabilities.with_changes(kv_pool={"kv_groups": True}, cross_attention=_LAYERS)

    @override
    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        assert batch.encoder_lens is not None
        return batch.encoder_lens[: batch.batch_size].to(torch.int32)

    @override
    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        key = self.index[: self.pages * self.context.page_size]
        return (key < meta.kv_lens[:, None, None]).expand(-1, position.shape[1], -1)

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        assert self.metadata is not None
        if batch.encoder_out_cache_loc is not None:
            self.context.kv_pool.set_kv_buffer(layer, self.encoder_slots(batch), k, v)
        return self.attend(q, layer, self.metadata)

    def encoder_slots(self, batch: ForwardBatch) -> torch.Tensor:
        """[E] int64: slots of the encoder tokens that the step stores."""
        assert batch.encoder_out_cache_loc is not None
        return batch.encoder_out_cache_loc


class KeysBehindEncoder(PlannedBackend):
    """Child of the other layers, whose keys are in the columns after those of the encoder."""

    @override
    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        first = self.first_columns(batch)
        page = self.context.page_size
        rows = self.context.req_to_token[batch.req_pool_indices[: batch.batch_size].long()]
        column = first[:, None] + self.index[: self.pages] * page
        return (rows.gather(1, column.clamp(max=rows.shape[1] - 1)) // page).to(torch.int32)

    def first_columns(self, batch: ForwardBatch) -> torch.Tensor:
        """[B] int64: column of the first key of each request."""
        if not self.context.max_encoder_len:
            return torch.zeros(batch.batch_size, dtype=torch.int64, device=self.context.device)
        assert batch.encoder_lens is not None
        return batch.encoder_lens[: batch.batch_size].long()


class EncoderDecoderBackend(GroupedBackend):
    """Healthy parent: a ``PlannedBackend`` for each kind of layers, over one pool and one request table."""

    capabilities: ClassVar[Capabilities] = GroupedBackend.capabilities.with_changes(
        eager=MODES,
        graph=MODES,
        bounds={"max_topk": 0},
        windows=(),
        kv_pool={"kv_groups": False},
        cross_attention={"modes": MODES, "encoder_slots": {"first"}},
    )
    child: ClassVar[type[PlannedBackend]] = KeysBehindEncoder
    encoder_child: ClassVar[type[EncoderKeys]] = EncoderKeys

    def __init__(self, context: BackendContext) -> None:
        if not any(layer.is_cross_attention for layer in context.layers):
            super().__init__(context)
            return
        AttentionBackend.__init__(self, context)
        self.children = [self.of_kind(crosses) for crosses in (False, True)]

    def of_kind(self, crosses: bool) -> PlannedBackend:
        """Child of the cross-attention layers, or of the others."""
        layers = tuple(layer for layer in self.context.layers if layer.is_cross_attention == crosses)
        child = self.encoder_child if crosses else self.child
        return child(replace(self.context_of(self.context.group_of(layers[0])), layers=layers))

    @override
    def each(self, batch: ForwardBatch) -> Iterator[tuple[PlannedBackend, ForwardBatch]]:
        for child in self.children:
            yield child, self.batch_of(self.context.group_of(child.context.layers[0]), batch)

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        own = self.batch_of(self.context.group_of(layer), batch)
        child = next(each for each in self.children if layer in each.context.layers)
        return child.forward(q, k, v, layer, own, save_kv_cache)


class EncoderInItsOwnGroup(EncoderDecoderBackend):
    """Healthy parent: cross-attention layers have a pool and a request table of their own (vLLM)."""

    capabilities = EncoderDecoderBackend.capabilities.with_changes(
        kv_pool={"kv_groups": True}, cross_attention={"encoder_slots": {"own_group"}}
    )
    child = PlannedBackend
