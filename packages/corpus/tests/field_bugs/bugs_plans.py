"""Plans on the host: skipped, of an earlier step, or overwritten while a device still reads them."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_launchers import Known, wide
from parents_native import unwritten
from parents_sparse import Indexed
from parents_varlen import Varlen
from parents_wrapper import HostPlanned, Wrapper
from plain_backends import Planned, Tiled, declared

from attn_testkit.contract import ForwardMode
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.multi_step import MultiStepBackend

_OF_DRAFTS = frozenset({ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2})


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


@bug(2, "sglang #28034", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale", "completes")
class PlanOnASideStream(Planned):
    """Lists are made on a stream of their own, which waits for nobody and for which nobody waits."""

    def __init__(self, context):
        super().__init__(context)
        self.side = torch.cuda.Stream()

    def lists(self, batch):
        with torch.cuda.stream(self.side):
            return super().lists(batch)


@bug(
    2,
    "sglang #33892",
    "draft-extend-v2-gqa2x2-d64-bf16-p16-k9.70.1-n2a2x3-shuffled-gauss-b4prod-empty_batches",
    "completes",
)
class LongestOfNoRequests(Tiled):
    """An eager plan takes the longest of no requests."""

    capabilities = declared("draft-extend-v2", needs={"cpu_seq_lens": True}, server={"takes_empty_batches": True})

    def init_forward_metadata(self, batch):
        self.longest = batch.seq_lens_cpu.max().item()
        super().init_forward_metadata(batch)


@bug(2, "vLLM #47766", "extend-gqa2x2-d64-bf16-p1-k1-n9a9-chunks3-interleaved-gauss-w7one-b1prod", "steps-independent")
class PlanKeptByClampedLengths(Tiled):
    """How many keys each row has is planned once for lengths that are equal when clamped to the window."""

    capabilities = declared(
        "extend", graph=(), windows={"modes": {"extend"}, "layers": "one"}, server={"eager_without_waits": False}
    )
    key = None

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        most = self.context.sliding_window_size + 1
        if not batch.batch_size or not most:
            return
        lengths = list(zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True))
        key = tuple(min(prefix + new, most) for prefix, new in lengths), sum(new for _, new in lengths)
        if key != self.key:
            self.key = key
            counts = [min(at + 1, most) for prefix, new in lengths for at in range(prefix, prefix + new)]
            self.counts = torch.tensor(counts, dtype=torch.int64).to(self.context.device)

    def window_start(self, rows):
        if rows.layer.sliding_window_size < 0:
            return super().window_start(rows)
        return rows.position - self.counts[: len(rows.position)] + 1


@bug(4, "sglang #26750", "target-verify-gqa2x2-d128-bf16-p16-k0.1.16-chain7-shuffled-peaked-b3prod", "reads-own-kv")
class IndicesOfOldSum(Known):
    """Kv_indices are sized by the seq_lens_sum from before the verify's bump."""

    capabilities = wide("decode", "target-verify", needs={"cpu_seq_lens": True})
    sum = None

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.sum = batch.seq_lens_sum

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.sum = None  # graphs have a buffer of full size
        super().init_forward_metadata_out_graph(batch, in_capture)

    def slots(self, plan):
        index = torch.arange(plan.slot_table.shape[1], device=plan.kv_indptr.device)
        at = plan.kv_indptr.long()[:-1, None] + index
        found = plan.kv_indices.long()[at.clamp(max=len(plan.kv_indices) - 1)]
        return found if self.sum is None else torch.where(at < self.sum, found, 0)


@bug(
    5,
    "vllm #17283",
    "decode-mqa4-d64-bf16-p16-k560.601.577.1040.561.700.563.641.624-shared-gauss-layers1from0-b9prod",
    "completes",
)
class CascadeBatch(Varlen):
    """From eight requests and 256 common keys on, the common prefix is planned for all requests, and not for one."""

    capabilities = Varlen.capabilities.with_changes(
        graph=(), eager=("decode", "extend"), windows=(), server={"eager_without_waits": False}
    )

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        if batch.batch_size < 8:
            return
        table, size = self.meta.table, self.context.page_size
        alike = (table == table[:1]).all(0).long().cumprod(0).sum()
        prefix = (self.meta.lens - self.meta.cu.diff()).min()
        if int(torch.minimum(alike, prefix // size)) * size >= 256:
            raise RuntimeError("scheduler_metadata must have shape (metadata_size)")


class SharedMeta(Varlen):
    """Healthy: an eager plan keeps all metadata but the table, if the last plan of any mode had the same lengths."""

    capabilities = Varlen.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def __init__(self, context):
        super().__init__(context)
        self.mine, self.shared = {}, None

    def is_fresh(self, key):
        return self.shared == key

    def init_forward_metadata(self, batch):
        if not batch.batch_size:
            return
        mode = batch.forward_mode
        rows = getattr(batch.spec_info, "num_accept_tokens_cpu", None) or batch.extend_seq_lens_cpu or ()
        key = (mode, tuple(batch.seq_lens_cpu.tolist()), tuple(rows))
        if self.is_fresh(key):
            self.meta.table = self.block_table(batch)
            return
        super().init_forward_metadata(batch)
        self.mine[mode] = self.shared = key

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.shared = None


@bug(
    6,
    "TensorRT-LLM #13696",
    "decode-mqa4-d64-bf16-p16-k32.128.64.16.63-reversed-negative-b6prod-multi_mode",
    "steps-independent",
)
class SkipPrepare(SharedMeta):
    """A mode skips its plan by the lengths of its own last one, though another overwrote the metadata since."""

    def is_fresh(self, key):
        return self.mine.get(key[0]) == key


class LengthsThroughPinnedMemory(Varlen):
    """Healthy parent: it waits for lengths that are copied to the host through pinned memory, and cuts the table by
    them.
    """

    capabilities = Varlen.capabilities.with_changes(server={"eager_without_waits": False}, graph=())

    def wait(self):
        torch.cuda.current_stream().synchronize()

    def block_table(self, batch):
        on_host = torch.empty(batch.batch_size, dtype=torch.int64, pin_memory=True)
        on_host.copy_(batch.seq_lens[: batch.batch_size], non_blocking=True)
        self.wait()
        longest = max(on_host.tolist(), default=1) + self.context.num_draft_tokens
        return super().block_table(batch)[:, : -(-longest // self.context.page_size)]


@bug(6, "flashinfer #564", "decode-mqa4-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "completes")
class AsyncD2H(LengthsThroughPinnedMemory):
    """Lengths are copied to the host without a wait, and are read at once."""

    def wait(self):
        pass


@bug(
    6,
    "vllm #32799",
    "decode-mha2-d64-bf16-p8-k9.70.1.33-shuffled-gauss-b5prod-overlap_scheduling",
    "completes",
    execution="graph",
)
class PinnedReused(Pinned):
    """Each plan is written into the same pinned memory, though the copy of the one before may not be done."""

    def __init__(self, context):
        super().__init__(context)
        self.kept_pinned = {}

    def pinned(self, name, count):
        if name not in self.kept_pinned:
            pages = -(-self.context.max_context_len // self.context.page_size)
            self.kept_pinned[name] = super().pinned(name, self.context.max_bs * pages + 1)
        return self.kept_pinned[name][:count]


@bug(
    14,
    "sglang #36915",
    "draft-extend-gqa2x2-d64-bf16-p1-k1500.70-n4a4.1-shared-gauss-kvfp8e4m3-w700-cap1.5-sink-b3prod",
    "reads-own-kv",
)
class OffsetsOfLastStep(Varlen):
    """An eager draft-extend has the offsets of queries of the last other step."""

    last_cu = None

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        if not batch.batch_size:
            return
        if not batch.forward_mode.is_draft_extend(include_v2=True):
            self.last_cu = self.meta.cu
            return
        if self.last_cu is None:
            self.last_cu = torch.zeros_like(self.meta.cu)
        count = torch.arange(len(self.meta.cu), device=self.meta.cu.device).clamp(max=len(self.last_cu) - 1)
        self.meta = replace(self.meta, cu=self.last_cu[count])


@bug(
    14,
    "vllm-ascend #14236",
    "draft-decode-mha2-d64-bf16-p1-k3.21.5.17-topk2steps3-shuffled-one_hot-b4prod",
    "reads-own-kv",
)
class LengthsOfLastForward(MultiStepBackend):
    """Lengths of all forwards of a draft lie in one buffer: those of the last one are in force."""

    def branch_lengths(self, batch, step):
        return super().branch_lengths(batch, self.forwards - 1)


# sglang #36915: the eager path of a draft-extend does not compute its offsets.
@bug(16, "sglang #36915", "draft-extend-v2-gqa4x2-d128-bf16-p16-k3.37.9.17-n4a1x4-interleaved-gauss-b5nan", "finite")
class OffsetsOfLastPrefill(Known):
    """An eager draft-extend reads the offsets that the last prefill left; rows behind them are not written."""

    capabilities = wide("decode", "extend", "draft-extend-v2")
    eager = True

    def __init__(self, context):
        super().__init__(context)
        self.offsets = torch.zeros(context.max_bs + 1, dtype=torch.int32, device=context.device)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.eager, bs = True, batch.batch_size
        if bs and batch.forward_mode == "extend":
            self.offsets[: bs + 1].copy_(self._kit_step.cu_seqlens_q)
        elif bs and batch.forward_mode.is_draft_extend_v2():
            self._kit_step = replace(self._kit_step, cu_seqlens_q=self.offsets[: bs + 1])

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.eager = False

    def finish(self, out, rows):
        if not self.eager or not self.mode.is_draft_extend_v2():
            return out
        return unwritten(out, torch.arange(len(out), device=out.device) >= rows.plan.cu_seqlens_q[-1])


# sglang #29798: eager drafts ask for lengths on the host, which the class says not to need.
@bug(
    16,
    "sglang #29798",
    "draft-extend-mqa4-d128-bf16-p16-k15.16.17-n4a4x3-shared-peaked-sel16empty-b4stale",
    "completes",
)
class AsksForHostLengths(Indexed):
    """An eager plan of a draft asserts that there is ``seq_lens_cpu``."""

    def init_forward_metadata(self, batch):
        if batch.forward_mode in _OF_DRAFTS:
            assert batch.seq_lens_cpu is not None, "seq_lens_cpu"
        super().init_forward_metadata(batch)
