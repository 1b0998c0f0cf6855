"""What is planned and kept; bugs of the fourth set."""

from __future__ import annotations

import torch
from fourth_parents import Known, OwnSlots, OwnStart, wide
from plain_backends import Planned, Rows

from attn_testkit_corpus.faults.catalogue import bug


@bug(
    "sglang #27664",
    "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale",
    "addresses-stable",
    execution="graph",
)
class NewObjectsAtReplay(Planned):
    """A replay makes new metadata instead of filling those that the graph reads."""

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        if in_capture:
            return super().init_forward_metadata_out_graph(batch, in_capture)
        indptr, indices, lens = self.lists(batch)
        self.bind(indptr, in_capture)
        self.buffers["indices"][: len(indices)].copy_(indices)
        self.planned = {**self.planned, "lens": lens.clone()}


@bug(
    "vllm #40054",
    "extend-gqa2x2-d64-bf16-p16-k3-n4a11-shuffled-gauss-layers1from0-b3prod",
    "buckets-independent",
    execution="graph",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k3.37.9.17-n6a1x3.19-reversed-peaked-b4prod-empty_batches",
)
class QueryStartTailStale(OwnStart):
    """Query_start_loc has entries of live requests alone; the tail is an older batch's."""

    def fill(self, batch, in_capture):
        live = batch.batch_size if in_capture else batch.batch_size - batch.num_padding
        self.start[: live + 1].copy_(batch.query_start_loc[: live + 1])


@bug("vllm #13418", "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod", "writes-own-kv", execution="graph")
class PaddedRowsStored(OwnSlots):
    """All rows of the padded key are stored, by a slot buffer whose tail is stale."""

    def behind(self, live):
        pass


@bug("sglang #32625", "decode-gqa2x4-d128-bf16-p16-k600.40.4-shuffled-gauss-layers3from5by4x2d64.8x4d128-b4prod")
class PlanOfFirstHeads(Known):
    """Planned with one head count; what is behind the planned work is not computed."""

    capabilities = wide("decode", "extend", heads={"heads_by_layer": True})

    def finish(self, out, rows):
        planned = self.context.layers[0].tp_q_head_num
        t, h, _ = out.shape
        out[t * min(planned, h) // h :] = 0
        return out


@bug(
    "sglang #30340",
    "decode-gqa2x2-d64-bf16-p64-k1087.1088.1089-contiguous-one_hot-layers2from5-"
    "b6stale-empty_batches-overlap_scheduling",
    "completes",
)
class LayerZeroAtInit(Known):
    """The constructor asks the pool for layer 0."""

    capabilities = wide("decode", "extend")

    def __init__(self, context):
        super().__init__(context)
        self.v_head_dim = context.kv_pool.get_value_buffer(0).shape[-1]


@bug("sglang #27752", "decode-gqa2x2-d64-bf16-p16-k9.70.1-shuffled-gauss-b4prod-padded_tokens")
class PlannedBeforePadding(Known):
    """Planned before the batch is padded; a row's request is row // (rows // requests)."""

    capabilities = wide("decode", "target-verify", "draft-extend-v2", server={"takes_more_rows": True})

    def rows_of(self, q, plan):
        bs = len(plan.kv_lens)
        width = max(len(q) // bs, 1)
        row = torch.arange(len(q), device=q.device)
        request = (row // width).clamp(max=bs - 1)
        place = row - request * width
        return Rows(plan, request, place, plan.kv_lens[request].long() - width + place)


@bug(
    "vllm-ascend #15707",
    "extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n4a1x6.19-reversed-mean-b8prod",
    execution="graph",
)
class UniformByTotal(Known):
    """In eager a batch counts as uniform where its total of rows is a uniform one's."""

    capabilities = wide("decode", "extend")
    width = 4
    eager = True

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False

    def rows_of(self, q, plan):
        rows = super().rows_of(q, plan)
        if not self.eager or not self.extends() or len(q) != self.width * len(plan.kv_lens):
            return rows
        row = torch.arange(len(q), device=q.device)
        request, place = row // self.width, row % self.width
        return Rows(plan, request, place, plan.kv_lens[request].long() - self.width + place)


@bug("flashinfer #1046", "extend-gqa2x2-d64-bf16-p64-k7x2-n34a1.67-interleaved-rising_logits-b3prod", "finite")
class UninitialisedTail(Known):
    """Rows of the last V tile hold what was there before, times weight 0."""

    capabilities = wide("decode", "extend")

    def parts(self, scores, seen, v, rows):
        if self.extends():
            index = torch.arange(seen.shape[1], device=seen.device)
            end = (rows.kv_lens + self.TILE - 1) // self.TILE * self.TILE
            tail = (index >= rows.kv_lens[:, None]) & (index < end[:, None])
            v = torch.where(tail[:, :, None, None], torch.empty_like(v), v)
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            seen = seen | tail
        return super().parts(scores, seen, v, rows)


@bug("sglang #26750", "target-verify-gqa2x2-d128-bf16-p16-k0.1.16-chain7-shuffled-peaked-b3prod", "reads-own-kv")
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
    "onnxruntime #28200",
    "extend-gqa2x2-d64-bf16-p16-k3-n4a8-shuffled-gauss-layers1from0-b2prod",
    "replay-follows-batch",
    execution="graph",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n4a1x6.19-reversed-mean-b8prod",
)
class GridFromTotals(Known):
    """Longest request = rows - requests + 1; what is behind it is not launched."""

    capabilities = wide("decode", "extend")

    def finish(self, out, rows):
        longest = len(out) - len(rows.plan.kv_lens) + 1
        return torch.where((rows.place < longest)[:, None, None], out, 0.0) if self.extends() else out


@bug("TileOPs #646", "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod", "completes", execution="graph")
class OneVariantForAll(Known):
    """The output index of the variant that is compiled first is kept for the other."""

    capabilities = wide("decode")
    compiled = None

    def run(self, q, kv, plan):
        parameters = 6 if len(plan.kv_lens) >= 4 else 9  # no split, split
        self.compiled = self.compiled or parameters
        if self.compiled != parameters:
            raise RuntimeError("kernel: ndim mismatch of argument -1")
        return super().run(q, kv, plan)


@bug("mirage #709", "extend-gqa2x2-d64-bf16-p64-k7x2-n34a1.67-interleaved-rising_logits-b3prod")
class MaxTokensEight(Known):
    """A task has 8 tokens, however large the batch is."""

    capabilities = wide("decode", "extend")

    def finish(self, out, rows):
        return torch.where((rows.place < 8)[:, None, None], out, 0.0) if self.extends() else out
