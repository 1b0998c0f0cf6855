"""What is planned and kept; bugs of the fifth set."""

from __future__ import annotations

import torch
from fifth_parents_split import SplitKV
from fifth_parents_varlen import Varlen
from fifth_parents_wrapper import HostPlanned, Wrapper

from attn_testkit_corpus.faults.catalogue import bug


@bug(
    "vllm #19321",
    "extend-gqa7x2-d64-bf16-p16-k3.37.9.17-n1a1x4-shuffled-one_hot-w4-b4prod",
    "padding-inert",
    execution="graph",
)
class StartLocPad(Varlen):
    """Where rows of requests begin is -1 for those without rows, and no longer rises."""

    def fill(self, cu, lens, table):
        super().fill(cu, lens, table)
        self.kept.cu[1 : len(cu)] = cu[1:].masked_fill(cu.diff() == 0, -1)


@bug(
    "nntrainer #4317",
    "decode-gqa8x2-d128-bf16-p8-k1.2.5.9.14.2.30-reversed-gauss-w11-b8prod",
    "replay-follows-batch",
    execution="graph",
)
class RegimeAtCapture(HostPlanned):
    """Whether a window leaves out anything is decided by the lengths of the capture."""

    def at_capture(self, wrapper, longest):
        wrapper.seen_at_capture = longest

    def window(self, layer):
        longest = getattr(self.active, "seen_at_capture", self.longest)
        return layer.sliding_window_size if longest > layer.sliding_window_size + 1 else -1


@bug(
    "vllm #39773",
    "decode-mha2-d64-bf16-p32-k1056.1152.1088.16.63-shared-rising_logits-w0-"
    "cap1.5-layers3from5varied-b5prod-padded_tokens",
    "completes",
    execution="graph",
)
class RowsAsRequests(HostPlanned):
    """Decode takes the rows of Q, padding's too, for the requests of the plan: behind it lies an older one."""

    def __init__(self, context):
        super().__init__(context)
        most, few = context.max_bs, {"dtype": torch.int32, "device": context.device}
        self.start = torch.zeros(most + 1, **few)
        self.last = torch.ones(most, **few)
        self.row = torch.arange(most + 1, **few)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        if batch.forward_mode.is_decode():
            self.start[: batch.batch_size + 1].copy_(self.active.pages)
            self.last[: batch.batch_size].copy_(self.active.last)
            self.active = Wrapper(self.row, self.start, self.active.indices, self.last)

    def planned(self, rows):
        return self.active.of_requests(rows) if self.active.rows is self.row else self.active

    def pages(self, at, inside, plan):
        return plan.indices[torch.where(inside, at, 0)].long()


@bug(
    "rvllm #32",
    "decode-gqa8x2-d256-bf16-p1-k13-interleaved-rising_logits-w46-b1prod-overlap_scheduling",
    "writes-own-kv",
    execution="graph",
)
class PadSlotsLive(HostPlanned):
    """The end of the buffer of slots that graphs read holds a live slot."""

    in_graph = False

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.new_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.context.device)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.in_graph = False

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.in_graph, slots = True, batch.out_cache_loc
        self.new_slots[: len(slots)].copy_(slots)
        self.new_slots[len(slots) :] = slots[0]

    def write(self, layer, batch, k, v):
        slots = self.new_slots[: len(k)] if self.in_graph else batch.out_cache_loc
        self.context.kv_pool.set_kv_buffer(layer, slots, k, v)


@bug(
    "aprender #2030",
    "decode-mha2-d128-bf16-p8-k1025.33-shuffled-plus_minus_one-b3prod",
    "replay-follows-batch",
    execution="graph",
)
class ChunksAtCapture(HostPlanned):
    """The number of chunks of 1024 keys is the capture's."""

    def at_capture(self, wrapper, longest):
        wrapper.chunks = -(-longest // 1024)

    def keep(self, seen, index, lens):
        chunks = getattr(self.active, "chunks", None)
        return seen if chunks is None else seen & (index < chunks * 1024)


@bug("hip-attention #22", "decode-mqa4-d64-bf16-p1-k9.70.1.33.9.70.1.33-shuffled-gauss-b8prod")
class EmptyUnwritten(SplitKV):
    """A split without keys writes nothing, and what its memory held is merged."""

    def store(self, outs, lses, out, lse, has_keys):
        outs.copy_(torch.where(has_keys[:, None, None], out, outs))
        lses.copy_(torch.where(has_keys[:, None], lse, lses))


@bug("flashinfer #2002", "decode-mqa4-d64-bf16-p1-k9.70.1.33.9.70.1.33-shuffled-gauss-b8prod", "output-written")
class CounterUninit(SplitKV):
    """Counters of the splits that have arrived lie in memory that nobody cleared."""

    def reserve(self):
        super().reserve()
        self.arrived = torch.empty(self.most, dtype=torch.int32, device=self.context.device)

    def finish(self, out, rows):
        arrived = self.arrived[: len(out)] if len(out) <= self.most else self.arrived.new_empty(len(out))
        arrived += self.SPLITS
        last = arrived == self.SPLITS
        arrived.masked_fill_(last, 0)
        return torch.where(last[:, None, None], out, torch.empty_like(out))
