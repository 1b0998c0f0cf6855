"""Healthy backends that bugs of the sixth set are put into, beside those of the sets before."""

from __future__ import annotations

import torch
from fifth_parents_split import SplitKV
from fifth_parents_wrapper import HostPlanned, Wrapper
from plain_backends import Tiled, declared

from attn_testkit.contract import TreeMaskMode, VerifyMask


class FullMask(Tiled):
    """Trees by a FULL_MASK in a buffer of its own, for as many requests as graphs have."""

    capabilities = declared("target-verify", bounds={"max_topk": 4, "max_q_rows": 16})

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        c = self.context
        if c.topk > 1:
            cells = max_bs * c.num_draft_tokens * c.max_context_len
            buffer = torch.zeros(cells, dtype=torch.bool, device=c.device)
            self._kit_mask = VerifyMask(buffer, TreeMaskMode.FULL_MASK, self.most_requests(max_bs))

    def most_requests(self, max_bs):
        return max_bs


class Pinned(HostPlanned):
    """All that is planned goes to the device from pinned memory, new for each plan, and nothing waits."""

    def pinned(self, name, count):
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def plan(self, batch):
        size, device = self.context.page_size, self.context.device
        rows, keys = self.host_lens(batch)
        counts = torch.tensor([-(-n // size) for n in keys])
        starts = [torch.tensor([0, *each]).cumsum(0) for each in (rows, counts.tolist())]
        request = torch.repeat_interleave(torch.arange(len(rows)), counts)
        planned = {
            "rows": starts[0],
            "pages": starts[1],
            "last": torch.tensor([(n - 1) % size + 1 if n else 0 for n in keys]),
            "request": request,
            "column": (torch.arange(len(request)) - starts[1][request]) * size,
        }
        sent = {}
        for name, values in planned.items():
            staged = self.pinned(name, len(values)).copy_(values)
            sent[name] = staged.to(device, non_blocking=True)
        table = batch.req_pool_indices[: batch.batch_size].long()
        indices = self.context.req_to_token[table[sent["request"].long()], sent["column"].long()] // size
        return Wrapper(sent["rows"], sent["pages"], indices, sent["last"])


class Counted(SplitKV):
    """Of a request with one row, the last split to arrive merges them: a counter says so, and is zero again."""

    capabilities = declared(
        "decode", "extend", "target-verify", "draft-extend", "draft-decode", bounds={"max_draft_branches": 2}
    )

    def reserve(self):
        super().reserve()
        self.arrived = torch.zeros(self.most, device=self.context.device)

    def finish(self, out, rows):
        if rows.plan.max_q_len > 1 or len(out) > self.most:
            return out
        arrived = self.arrived[: len(out)]
        arrived += self.SPLITS
        last = arrived == self.SPLITS
        arrived.masked_fill_(last, 0)
        return torch.where(last[:, None, None], out, torch.empty_like(out))
