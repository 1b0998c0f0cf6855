"""FlashInfer's style: lists of pages are planned on the host, and graphs read them in buffers that wrappers keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from parents_varlen import attend_rows, slices
from plain_backends import FP8, declared

from attn_testkit.contract import AttentionBackend

MODES = ("decode", "extend", "target-verify", "draft-extend-v2")


@dataclass
class Wrapper:
    """One plan: where each request's rows and pages begin, the pages, and how full each last one is."""

    rows: torch.Tensor
    pages: torch.Tensor
    indices: torch.Tensor
    last: torch.Tensor

    def of_requests(self, count):
        return Wrapper(self.rows[: count + 1], self.pages[: count + 1], self.indices, self.last[:count])


class HostPlanned(AttentionBackend):
    capabilities = declared(
        *MODES,
        heads={"families": {"mha", "gqa"}, "gqa_ratios": {1, 3, 4, 8}, "head_dims": {64, 128, 256}},
        kv_pool={"kv_dtypes": FP8, "page_sizes": {1, 8, 32}},
        bounds={"max_context_len": 4096},
        windows=MODES,
        options={"logit_cap": True},
        needs={"cpu_seq_lens": True},
        server={"takes_more_rows": True},
    )

    def __init__(self, context):
        super().__init__(context)
        self.wrappers = {}

    def host_lens(self, batch):
        """Rows and keys of each request."""
        bs, mode = batch.batch_size, batch.forward_mode
        keys = [int(n) for n in batch.seq_lens_cpu[:bs]]
        if mode == "extend":
            return [int(n) for n in batch.extend_seq_lens_cpu[:bs]], keys
        count = 1 if mode.is_decode() else self.context.num_draft_tokens
        return [count] * bs, [n + count for n in keys] if mode.is_target_verify() else keys

    def plan(self, batch):
        size, device = self.context.page_size, self.context.device
        rows, keys = self.host_lens(batch)
        counts = torch.tensor([-(-n // size) for n in keys])
        starts = [torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in (rows, counts.tolist())]
        last = torch.tensor([(n - 1) % size + 1 if n else 0 for n in keys], dtype=torch.int32)
        request = torch.repeat_interleave(torch.arange(len(rows)), counts)
        column = (torch.arange(len(request)) - starts[1].long()[request]) * size
        table = batch.req_pool_indices[: batch.batch_size].long()
        indices = self.context.req_to_token[table[request.to(device)], column.to(device)] // size
        return Wrapper(*(start.to(device) for start in starts), indices, last.to(device))

    def init_forward_metadata(self, batch):
        self.active = self.plan(batch)
        self.longest = max(self.host_lens(batch)[1])

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        few = {"dtype": torch.int32, "device": self.context.device}
        pages = max_bs * -(-self.context.max_context_len // self.context.page_size)
        self.kept = Wrapper(
            torch.zeros(max_bs + 1, **few), torch.zeros(max_bs + 1, **few), torch.zeros(pages, **few),
            torch.ones(max_bs, **few),
        )  # fmt: skip

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        key, plan = (batch.forward_mode, batch.batch_size), self.plan(batch)
        for name, values in vars(plan).items():
            getattr(self.kept, name)[: len(values)].copy_(values)
        if in_capture:
            self.wrappers[key] = self.kept.of_requests(batch.batch_size)
            self.at_capture(self.wrappers[key], max(self.host_lens(batch)[1]))
        self.active, self.longest = self.wrappers[key], self.context.max_context_len

    def at_capture(self, wrapper, longest):
        pass

    def planned(self, rows):
        return self.active

    def write(self, layer, batch, k, v):
        self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)

    def pages(self, at, inside, plan):
        """Pages at places of the list, of which some are not ``inside`` the request's own."""
        return plan.indices[at.clamp(max=len(plan.indices) - 1)].long()

    def keep(self, seen, index, lens):
        return seen

    def window(self, layer):
        return layer.sliding_window_size

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        plan, size = self.planned(len(q)), self.context.page_size
        if save_kv_cache:
            self.write(layer, batch, k, v)
        pool = self.context.kv_pool.get_kv_pages(layer.layer_id)
        row = torch.arange(len(q), device=q.device, dtype=torch.int32)
        request = (torch.searchsorted(plan.rows, row, right=True) - 1).clamp(0, len(plan.last) - 1)
        count, start = plan.pages.diff()[request].long(), plan.pages[request].long()
        lens = ((count - 1) * size + plan.last[request]).clamp(min=0)
        position = lens - plan.rows.diff()[request] + row - plan.rows[request]
        column = torch.arange(-(-self.longest // size), device=q.device)
        index = torch.arange(len(column) * size, device=q.device)
        out = torch.empty(len(q), layer.tp_q_head_num, layer.v_head_dim, dtype=q.dtype, device=q.device)
        for some in slices(len(q), len(index)):
            pages = self.pages(start[some, None] + column, column < count[some, None], plan)
            keys, values = (side[pages].flatten(1, 2) for side in pool)
            seen = self.keep(index <= position[some, None], index, lens[some, None])
            if self.window(layer) >= 0:
                seen = seen & (index >= position[some, None] - self.window(layer))
            out[some] = attend_rows(q[some], keys, values, seen, layer, pool[0].dtype.itemsize == 1).to(q.dtype)
        return out
