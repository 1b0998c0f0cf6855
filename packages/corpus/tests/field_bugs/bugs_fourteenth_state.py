"""What is planned, kept and written, and where outputs lie; bugs of the fourteenth set."""

from __future__ import annotations

from dataclasses import replace

import torch
from fifth_parents_varlen import Varlen
from fourth_parents import Known, OwnSlots, wide

from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.multi_step import MultiStepBackend


@bug(
    "sglang #29695",
    "target-verify-mqa4-d64-bf16-p1-k3x45.1x43.9x44-chain2-interleaved-gauss-b132prod",
    "replay-follows-batch",
    execution="graph",
)
class TableOfContextLength(Varlen):
    """Page tables of graphs have the columns of a context without the drafts that may go beyond it."""

    def __init__(self, context):
        super().__init__(context)
        drafts = context.num_draft_tokens if context.topk else 0
        self.graph_width = -(-(context.max_context_len - drafts) // context.page_size)

    def fill(self, cu, lens, table):
        super().fill(cu, lens, table[:, : self.graph_width])

    def views(self, bs, extends):
        views = super().views(bs, extends)
        return replace(views, table=views.table[:, : self.graph_width])


@bug(
    "vllm-ascend #11774",
    "decode-gqa2x2-d64-bf16-p16-k600.70.12-shuffled-mean-b3prod",
    "captures-cleanly",
    execution="graph",
)
class SlotsOfLastStepAtCapture(OwnSlots):
    """A capture does not reset the slots of new rows, and its run writes where the step before did."""

    capabilities = OwnSlots.capabilities.with_changes(eager={"decode", "extend"})

    def __init__(self, context):
        super().__init__(context)
        self.of_server = torch.zeros(context.max_num_tokens, dtype=torch.int64, device=context.device)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.new_slots = self.of_server

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        some = batch.out_cache_loc[: len(self.of_server)]
        self.of_server[: len(some)].copy_(some)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        if in_capture:
            self.eager = False
        else:
            super().init_forward_metadata_out_graph(batch, in_capture)


@bug(
    "flash-linear-attention #1031",
    "decode-gqa2x2-d128-bf16-p64-k32.128.64.16.63-contiguous-mean-b6prod-multi_mode",
    "output-written",
)
class TilesAtColumn0(Known):
    """A decode stores each tile of 64 columns of its output at column 0."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def finish(self, out, rows):
        if not self.decodes():
            return out
        stored = torch.empty_like(out)
        for first in range(0, out.shape[-1], 64):
            stored[..., :64] = out[..., first : first + 64]
        return stored


@bug("infr #38", "decode-gqa2x2-d64-bf16-p16-k15.16.17-shared-peaked-b3prod", "steps-independent")
class TapeByFingerprint(Known):
    """A decode of the shapes and addresses of an earlier one is a replay of that one's recording."""

    capabilities = wide("decode", "extend", graph=())

    def __init__(self, context):
        super().__init__(context)
        self.tapes = {}

    def run(self, q, kv, plan):
        if not self.decodes():
            return super().run(q, kv, plan)
        key, layer = (q.shape, q.stride(), kv[0].data_ptr()), plan.layer.layer_id
        if layer not in self.tapes or self.tapes[layer][0] != key:
            step = replace(plan.step, table=plan.step.table.clone(), kv_lens=plan.step.kv_lens.clone())
            self.tapes[layer] = key, step
        return super().run(q, kv, replace(plan, step=self.tapes[layer][1]))


@bug(
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
    "vllm-ascend #14236",
    "draft-decode-mha2-d64-bf16-p1-k3.21.5.17-topk2steps3-shuffled-one_hot-b4prod",
    "reads-own-kv",
)
class LengthsOfLastForward(MultiStepBackend):
    """Lengths of all forwards of a draft lie in one buffer: those of the last one are in force."""

    def branch_lengths(self, batch, step):
        return super().branch_lengths(batch, self.forwards - 1)
