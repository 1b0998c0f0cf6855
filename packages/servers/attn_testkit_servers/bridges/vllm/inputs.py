"""Buffers of vLLM's model runner for a batch: it fills them before every step, and graphs read them.

They are made once. Captured graphs and metadata hold slices of them, so a step writes into them and replaces none.
Lengths count the new tokens in every mode. Padded requests have no rows, no keys and a block table of zeros; rows after
the live ones have slot -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from attn_testkit.contract import BackendContext, DraftDecodeInput, ForwardBatch, ForwardMode, KVGroup, VerifyInput

from .numbers import width_of
from .ranks import fill_local_lens


@dataclass(frozen=True)
class Step:
    """Numbers of a batch that are known on the host."""

    num_reqs: int
    num_tokens: int
    """Number of tokens; in graphs with padding."""
    query_start_loc: torch.Tensor
    """[num_reqs + 1] int32. Its end is the number of live tokens; between requests it may be a bound."""
    max_query_len: int
    seq_lens_bound: torch.Tensor
    """[num_reqs] int32: upper bounds of the requests' keys."""
    max_seq_len: int
    for_capture: bool = False
    spans: dict[int, list[tuple[int, int]]] | None = None
    """Bidirectional ranges of each request (``compute_mm_prefix_ranges``); None in graphs, and for a causal model."""


class Inputs:
    """The buffers of one instance."""

    def __init__(self, context: BackendContext, groups: Sequence[KVGroup]) -> None:
        device, page = context.device, context.page_size
        blocks = -(-context.max_context_len // page)
        self.context, self.groups = context, groups
        self.buffers = InputBuffers(context.max_bs, context.max_num_tokens, device)
        self.block_tables = [torch.zeros(context.max_bs, blocks, dtype=torch.int32, device=device) for _ in groups]
        self.slot_mappings = torch.full(
            (len(groups), context.max_num_tokens), PAD_SLOT_ID, dtype=torch.int64, device=device
        )
        self._block_starts = torch.arange(blocks, device=device) * page

    def dummy(self, mode: ForwardMode, num_reqs: int, num_tokens: int) -> Step:
        """Fill the buffers for a capture, as ``prepare_inputs_to_capture`` does, with vLLM's own dummy batch."""
        longest = num_tokens if mode is ForwardMode.EXTEND else num_tokens // num_reqs
        batch = InputBatch.make_dummy(num_reqs, num_tokens, self.buffers, max_query_len=longest)
        for table in self.block_tables:
            table[:num_reqs].zero_()
        self.slot_mappings.fill_(PAD_SLOT_ID)
        fill_local_lens(self.context, self.buffers, num_reqs)
        return Step(
            num_reqs, num_tokens, torch.from_numpy(batch.query_start_loc_np), longest, batch.seq_lens_cpu_upper_bound,
            self.context.max_context_len, for_capture=True,
        )  # fmt: skip

    def fill(self, batch: ForwardBatch, *, replay: bool) -> Step:
        """Fill them for a step; ``batch`` is the view that a replay has, or an eager batch. Does not wait for the
        device."""
        mode, bs = batch.forward_mode, batch.batch_size
        live = batch.extend_num_tokens if mode is ForwardMode.EXTEND else batch.out_cache_loc.shape[0]
        assert live is not None
        assert batch.query_start_loc is not None
        if replay and not live:
            # A rank without a request, whose graph is replayed because others have some, has a dummy run.
            return self.dummy(mode, bs, self._rows_of_graph(batch))
        buffers, starts = self.buffers, batch.query_start_loc
        buffers.query_start_loc[: bs + 1].copy_(starts)
        buffers.query_start_loc[bs + 1 :] = live
        has_rows = starts.diff() > 0
        seq_lens = batch.seq_lens[:bs] + 1 if mode is ForwardMode.DRAFT_DECODE else batch.seq_lens[:bs]
        buffers.seq_lens[:bs].copy_(torch.where(has_rows, seq_lens, 0))
        buffers.seq_lens[bs:] = 0
        requests = batch.req_pool_indices[:bs].long()
        for group, table, slots in zip(self.groups, self.block_tables, self.slot_mappings, strict=True):
            blocks = group.req_to_token[requests][:, self._block_starts] // self.context.page_size
            table[:bs].copy_(torch.where(has_rows[:, None], blocks, 0))
            slots[:live].copy_(group.cache_loc(batch)[:live])
            slots[live:] = PAD_SLOT_ID
        fill_local_lens(self.context, buffers, bs)
        step = self._known_on_the_host(batch, live, replay)
        ranges = None if replay else batch.mm_prefix_range
        return step if ranges is None else replace(step, spans=dict(enumerate(ranges)))

    def advance(self, batch: ForwardBatch) -> None:
        """Advance to the next forward of a draft, inside its graph: the slots of its rows, and one key more per row."""
        assert isinstance(batch.spec_info, DraftDecodeInput)
        bs = batch.batch_size
        for group, slots in zip(self.groups, self.slot_mappings, strict=True):
            locs = group.cache_loc(batch)
            slots[: locs.shape[0]].copy_(locs)
        if batch.spec_info.step:
            lens = self.buffers.seq_lens[:bs]
            lens.add_(lens > 0)

    def _rows_of_graph(self, batch: ForwardBatch) -> int:
        """Number of rows that the graph was captured with."""
        if batch.forward_mode is ForwardMode.EXTEND:
            return batch.input_ids.shape[0]
        return batch.batch_size * self._width(batch)

    def _width(self, batch: ForwardBatch) -> int:
        """Most rows of a request in the batch, which may verify shorter drafts than were configured."""
        spec = batch.spec_info
        return spec.draft_token_num if isinstance(spec, VerifyInput) else width_of(self.context, batch.forward_mode)

    def _known_on_the_host(self, batch: ForwardBatch, live: int, replay: bool) -> Step:
        mode, bs, most = batch.forward_mode, batch.batch_size, self.context.max_context_len
        width = self._width(batch)
        if mode is ForwardMode.EXTEND:
            new, old = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
            assert new is not None
            assert old is not None
            # A padded request has no row, and its prefix length has no meaning.
            bound = torch.tensor(new, dtype=torch.int32) + torch.tensor(old, dtype=torch.int32)
            bound *= torch.tensor(new) > 0
            starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            rows = self._rows_of_graph(batch) if replay else live
            return Step(bs, rows, starts, rows if replay else max(new), bound, int(bound.max()))
        # As the runner does where drafts are accepted on the device: the right total, spread evenly.
        starts = (torch.arange(bs + 1, dtype=torch.int32) * width).clamp(max=live)
        bound = torch.where(starts.diff() > 0, most, 0).to(torch.int32)
        if batch.seq_lens_cpu is not None:
            bound = bound.minimum(batch.seq_lens_cpu[:bs] + (mode is ForwardMode.DRAFT_DECODE))
        return Step(bs, self._rows_of_graph(batch) if replay else live, starts, width, bound.int(), int(bound.max()))


def common_arguments(inputs: Inputs, step: Step) -> dict[str, Any]:
    """Arguments of ``build_attn_metadata``: slices of the buffers, and numbers known on the host."""
    return {
        "num_reqs": step.num_reqs,
        "num_tokens": step.num_tokens,
        "query_start_loc_gpu": inputs.buffers.query_start_loc[: step.num_reqs + 1],
        "query_start_loc_cpu": step.query_start_loc,
        "max_query_len": step.max_query_len,
        "seq_lens": inputs.buffers.seq_lens,
        "dcp_local_seq_lens": inputs.buffers.dcp_local_seq_lens if inputs.context.dcp_world_size > 1 else None,
        "max_seq_len": step.max_seq_len,
        "block_tables": [table[: step.num_reqs] for table in inputs.block_tables],
        "slot_mappings": inputs.slot_mappings[:, : step.num_tokens],
        "seq_lens_cpu_upper_bound": step.seq_lens_bound,
        "for_cudagraph_capture": step.for_capture,
        "mm_req_doc_ranges": step.spans,
    }
