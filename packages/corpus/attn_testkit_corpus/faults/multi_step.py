"""A healthy backend for drafts, built like the multi-step ones of servers: all forwards are planned at once.

Each forward has its own plan in its own buffers, made outside the graph from the lengths of the prefixes and the
request table. The kernel is that of ``PlannedBackend``: a branch is a request with one row.

Shapes: bs requests, K branches, R = bs * K rows, F = S - 1 forwards, P pages per row.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, DraftDecodeInput, ForwardBatch, ForwardMode

from .parent import Metadata, PlannedBackend

_MODES = {ForwardMode.DRAFT_DECODE}


def spec_of(batch: ForwardBatch) -> DraftDecodeInput:
    """``spec_info`` of a draft-decode."""
    assert isinstance(batch.spec_info, DraftDecodeInput)
    return batch.spec_info


class MultiStepBackend(PlannedBackend):
    """Healthy parent: draft-decode with a plan for each forward, all made before the first of them.

    Raises ``Unsupported`` for a context that its ``capabilities`` exclude.
    """

    capabilities = PlannedBackend.capabilities.with_changes(
        eager=_MODES,
        graph=_MODES,
        windows=_MODES,
        bounds={"max_draft_branches": 4, "max_topk": 0, "max_q_rows": 1},
        heads={"families": {"mha", "gqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        options={"logit_cap": False, "sinks": False},
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        heads = max(layer.tp_q_head_num for layer in context.layers)
        dim = max(layer.v_head_dim for layer in context.layers)
        self.forwards = context.speculative_num_steps - 1
        rows = context.max_bs * context.draft_branches
        self.workspace = self.new_workspace(rows * self.max_splits * heads * (dim + 1))
        self.draft: list[Metadata] = []
        """A plan for each forward."""
        self.drafts: dict[tuple[ForwardMode, int], list[Metadata]] = {}

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.steps = self.new_buffers(max_bs * self.context.draft_branches)

    def new_buffers(self, rows: int) -> list[Metadata]:
        """Buffers that the graphs read, with R = ``rows``, for each forward."""
        return [self.new_buffer(rows) for _ in range(self.forwards)]

    def new_buffer(self, rows: int) -> Metadata:
        """Buffers of one forward."""
        device = self.context.device
        return Metadata(
            page_table=torch.zeros(rows, self.pages, dtype=torch.int32, device=device),
            kv_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            chunk=torch.full((rows,), self.tile, dtype=torch.int32, device=device),
            slots=torch.zeros(rows, dtype=torch.int64, device=device),
            mask=None,
        )

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.draft = self.plan_draft(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        key = self.key(batch)
        if in_capture:
            self.drafts[key] = [self.rows_of(whole, batch) for whole in self.steps]
        self.draft = self.drafts[key]
        for views, plan in zip(self.draft, self.plan_draft(batch), strict=True):
            self.fill(views, plan, batch)

    def rows_of(self, whole: Metadata, batch: ForwardBatch) -> Metadata:
        """The part of a forward's buffers that a bucket uses."""
        rows = batch.batch_size * self.context.draft_branches
        views = {
            field.name: getattr(whole, field.name)[: rows + (field.name == "cu_seqlens_q")]
            for field in fields(Metadata)
            if field.name not in ("mask", "max_q_len")
        }
        return Metadata(**views, mask=None)

    def plan_draft(self, batch: ForwardBatch) -> list[Metadata]:
        """Make one plan per forward."""
        return [self.plan_forward(batch, step) for step in range(self.forwards)]

    def plan_forward(self, batch: ForwardBatch, step: int) -> Metadata:
        """Everything about one forward, on the device."""
        lens = self.branch_lengths(batch, step)
        return Metadata(
            page_table=self.branch_pages(batch),
            kv_lens=lens,
            cu_seqlens_q=self.index[: len(lens) + 1].to(torch.int32),
            chunk=self.plan_splits(lens),
            slots=self.branch_slots(batch, step),
            mask=None,
        )

    def branch_lengths(self, batch: ForwardBatch, step: int) -> torch.Tensor:
        """[R] int32: keys of each row in a forward."""
        lens = batch.seq_lens[: batch.batch_size].to(torch.int32) + step + 1
        return lens.repeat_interleave(self.context.draft_branches)

    def branch_pages(self, batch: ForwardBatch) -> torch.Tensor:
        """[R, P] int32: the pages of the prefix that all share, then those of the branch; the same in every forward."""
        page = self.context.page_size
        rows = self.context.req_to_token[batch.req_pool_indices[: batch.batch_size].long()]
        columns = self.branch_columns(batch.seq_lens[: batch.batch_size].long(), self.index[: self.pages] * page)
        found = rows.gather(1, columns.flatten(1).clamp(max=rows.shape[1] - 1))
        return (found.view(-1, self.pages) // page).to(torch.int32)

    def branch_columns(self, prefix: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """[bs, K, n] int64: column of the request table of each of the keys ``key`` [n]. ``prefix`` [bs] int64."""
        shared, region = self.branch_regions(prefix)
        shift = self.index[: self.context.draft_branches] * region[:, None]
        return key + shift[..., None] * (key >= shared[:, None, None])

    def branch_regions(self, prefix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[bs] int64 each: the column of branch 0's region, and the columns of a region."""
        page, last = self.context.page_size, prefix % self.context.page_size
        steps = self.context.speculative_num_steps
        return prefix - last, (last + steps + page - 1) // page * page

    def branch_slots(self, batch: ForwardBatch, step: int) -> torch.Tensor:
        """[R] int64: slots of a forward's rows; at a replay only those of live requests."""
        spec = spec_of(batch)
        return spec.out_cache_loc.view(-1, spec.num_steps)[:, step]

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
        self.metadata = self.draft[self.step_of(batch)]
        return super().forward(q, k, v, layer, batch, save_kv_cache)

    def step_of(self, batch: ForwardBatch) -> int:
        """Number of the plan of a forward."""
        return spec_of(batch).step
