"""A healthy backend for a whole speculative loop: drafts by a multi-step backend, everything else by a planned one."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionBackend, AttentionLayer, BackendContext, ForwardBatch, ForwardMode

from .multi_step import MultiStepBackend
from .parent import PlannedBackend

_MODES = {ForwardMode.DRAFT_DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND}


class SpeculativeBackend(AttentionBackend):
    """Healthy parent: a child for drafts and one for the other modes, as in servers."""

    capabilities = MultiStepBackend.capabilities.with_changes(
        eager=_MODES,
        graph=_MODES,
        windows=_MODES,
        bounds={"max_topk": 4, "max_q_rows": 8},
        kv_pool={"page_sizes": {1, 16}},
    )
    others: type[PlannedBackend] = PlannedBackend

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        draft = {ForwardMode.DRAFT_DECODE}
        self.children: dict[bool, AttentionBackend] = {}
        if context.modes & draft:
            alone = replace(context, modes=frozenset(draft), topk=0, num_draft_tokens=1)
            self.children[True] = MultiStepBackend(alone)
        if context.modes - draft:
            self.children[False] = self.others(replace(context, modes=context.modes - draft, draft_branches=0))

    def child(self, batch: ForwardBatch) -> AttentionBackend:
        """The child whose batch it is."""
        return self.children[batch.forward_mode is ForwardMode.DRAFT_DECODE]

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for child in self.children.values():
            child.init_cuda_graph_state(max_bs, max_num_tokens)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.child(batch).init_forward_metadata(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.child(batch).init_forward_metadata_out_graph(batch, in_capture)

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.child(batch).init_forward_metadata_in_graph(batch)

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
        return self.child(batch).forward(q, k, v, layer, batch, save_kv_cache)
