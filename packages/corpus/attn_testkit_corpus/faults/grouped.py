"""A healthy wrapper with a backend for each KV group, as vLLM has a metadata builder for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar, cast

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionBackend, AttentionLayer, BackendContext, Capabilities, ForwardBatch, KVGroup

from .parent import PlannedBackend


class GroupedBackend(AttentionBackend):
    """Healthy parent: a ``PlannedBackend`` per group, which is given only its layers, pool, table and slots."""

    capabilities: ClassVar[Capabilities] = PlannedBackend.capabilities.with_changes(
        kv_pool={"kv_groups": True, "kv_dtypes": {"same"}, "page_sizes": {4}},
        heads={"families": {"gqa"}, "head_dims": {64}, "gqa_ratios": {2}},
        precision={"dtypes": {"bf16"}},
        bounds={"max_q_rows": 6, "max_topk": 2},
        options={"sinks": False, "logit_cap": False},
    )
    child: ClassVar[type[PlannedBackend]] = PlannedBackend

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.children = [self.child(self.context_of(group)) for group in context.groups]

    def context_of(self, group: KVGroup) -> BackendContext:
        """Context of a group's child."""
        own = tuple(layer for layer in self.context.layers if layer.layer_id in group.layer_ids)
        return replace(self.context, layers=own, kv_pool=group.kv_pool, req_to_token=group.req_to_token, kv_groups=())

    def batch_of(self, group: KVGroup, batch: ForwardBatch) -> ForwardBatch:
        """Batch of a group's child, or the view of a replay, with its own slots."""
        own = {**vars(batch), "out_cache_loc": group.cache_loc(batch), "group_cache_locs": None}
        return ForwardBatch(**own) if isinstance(batch, ForwardBatch) else cast(ForwardBatch, SimpleNamespace(**own))

    def each(self, batch: ForwardBatch) -> Iterator[tuple[PlannedBackend, ForwardBatch]]:
        """Each child, with its batch."""
        for group, child in zip(self.context.groups, self.children, strict=True):
            yield child, self.batch_of(group, batch)

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
        group = self.context.group_of(layer)
        own = self.batch_of(group, batch)
        return self.children[group.index].forward(q, k, v, layer, own, save_kv_cache)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        for child, own in self.each(batch):
            child.init_forward_metadata(own)

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for child in self.children:
            child.init_cuda_graph_state(max_bs, max_num_tokens)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        for child, own in self.each(batch):
            child.init_forward_metadata_out_graph(own, in_capture)

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        for child, own in self.each(batch):
            child.init_forward_metadata_in_graph(own)
