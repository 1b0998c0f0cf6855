"""Healthy launchers that know their mode, as those of servers do, and keep buffers for graphs."""

from __future__ import annotations

from dataclasses import replace

import torch
from plain_backends import Rows, Tiled, declared

SPEC_V1_V2 = ("decode", "target-verify", "draft-extend", "draft-extend-v2")

WIDE = {"heads": {"gqa_ratios": {2, 4}, "head_dims": {64, 128}}, "kv_pool": {"page_sizes": {1, 16, 64}}}


def wide(*modes, **more):
    return declared(*modes, **WIDE).with_changes(**more)


def windowed(*modes, **more):
    return wide(*modes, windows=set(modes)).with_changes(**more)


class Known(Tiled):
    """A launcher that knows its mode, as servers' do."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode

    def extends(self):
        return self.mode == "extend"

    def decodes(self):
        return self.mode == "decode"


class OwnStart(Known):
    """Where rows begin, in a buffer of its own that graphs read; the last of two requests that have a row writes it."""

    capabilities = wide("decode", "extend", server={"padded_requests": {"nothing"}})
    eager = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.start = torch.zeros(max_bs + 1, dtype=torch.int32, device=self.context.device)

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False
        self.fill(batch, in_capture)

    def fill(self, batch, in_capture):
        bs = batch.batch_size
        self.start[: bs + 1].copy_(batch.query_start_loc[: bs + 1])

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        if not self.eager and batch.batch_size:
            self._kit_step = replace(self._kit_step, cu_seqlens_q=self.start[: batch.batch_size + 1])

    def rows_of(self, q, plan):
        row = torch.arange(len(q), device=q.device)
        cu = plan.cu_seqlens_q.long()
        has = (row[:, None] >= cu[None, :-1]) & (row[:, None] < cu[None, 1:])
        number = torch.arange(has.shape[1], device=q.device)
        request = torch.where(has, number, -1).amax(1).clamp(min=0)
        place = row - cu[request]
        position = plan.kv_lens[request].long() - cu.diff()[request] + place
        return Rows(plan, request, place, position)


class OwnSlots(Known):
    """Slots of new rows, in a buffer of its own that graphs read."""

    capabilities = wide("decode")
    eager = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.new_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.context.device)

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False
        loc = batch.out_cache_loc
        self.new_slots[: len(loc)].copy_(loc)
        self.behind(len(loc))

    def behind(self, live):
        self.new_slots[live:].zero_()

    def write_kv(self, k, v, plan):
        if not self.eager:
            plan = replace(plan, out_cache_loc=self.new_slots[: len(k)])
        super().write_kv(k, v, plan)
