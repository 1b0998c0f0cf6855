"""Indexers; bugs of the fourteenth set."""

from __future__ import annotations

import torch

from attn_testkit.contract import Indexer, Sparse
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.indexer import IndexerParent

_PAGE_BYTES = 64 * 132


class OfMode(IndexerParent):
    """A launcher that knows its mode."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode

    def extends(self):
        return self.mode == "extend"


@bug(
    "vllm #51252",
    "extend-mqa4-d128-bf16-p16-k0.1.16-n1a1x3-shared-one_hot-sel16-idx4reuse-b6small",
    "selects-best",
    execution="graph",
)
class WorkspaceTooSmall(OfMode):
    """A prefill gathers index keys of all requests into a workspace of one context; those behind it are not written."""

    def gathered(self, slots, layer_id):
        keys, scales = super().gathered(slots, layer_id)
        if not self.extends():
            return keys, scales
        lens = self._kit_step.kv_lens.long()
        start = (lens.cumsum(0) - lens)[self.requests]
        place = start[:, None] + torch.arange(slots.shape[1], device=slots.device)
        lost = place >= self.context.max_context_len
        return keys.masked_fill(lost[..., None], 0.0), scales.masked_fill(lost, 0.0)

    def scored(self, q, weights, plan):
        self.requests = self.request_of_row(q, plan)
        return super().scored(q, weights, plan)


@bug(
    "ATOM #1859",
    "target-verify-mqa4-d64-bf16-p16-k1039.1040.1041-chain7-contiguous-rising_logits-sel16-idx4ties-b3prod",
    "selection-well-formed",
)
class BoundOfRequest(OfMode):
    """In decode and verify the keys to select from are the request's, for each of its rows."""

    def lengths(self, rows, plan):
        right = super().lengths(rows, plan)
        return plan.kv_lens[self.request_of_row(rows, plan)].long() if self.mode.is_target_verify() else right


@bug(
    "sglang #34725",
    "decode-mqa4-d128-bf16-p16-k25.69.1-shuffled-gauss-sel16-idx4-layers1from0-b4prod-bigpool",
    "selects-best",
)
class PageOffsetsOf32Bits(IndexerParent):
    """The byte at which a page of index keys begins is computed in 32 bits."""

    def gathered(self, slots, layer_id):
        page = slots // 64
        offset = page.to(torch.int32) * torch.tensor(_PAGE_BYTES, dtype=torch.int32)
        wrapped = offset.long().div(_PAGE_BYTES, rounding_mode="floor").clamp(min=0)
        return super().gathered(wrapped * 64 + slots % 64, layer_id)


@bug(
    "pypto-lib #592",
    "extend-mqa4-d64-bf16-p16-k32.33.16-n7a17.2.1-chunks3-shared-gauss-sel16-idx4reuse-b4prod",
    "selection-well-formed",
)
class ScoresAsManyAsRows(OfMode):
    """A prefill scores as many keys of a request as it has new rows, from the first key on."""

    def lengths(self, rows, plan):
        right = super().lengths(rows, plan)
        count = plan.cu_seqlens_q.diff()[self.request_of_row(rows, plan)]
        return torch.minimum(right, count.long()) if self.extends() else right


@bug(
    "mlx-lm #1189",
    "extend-mqa4-d64-bf16-p16-k32.33.16-n7a17.2.1-chunks3-shared-gauss-sel16-idx4reuse-b4prod",
    "selection-well-formed",
)
class KeysOfTheChunk(OfMode):
    """A prefill knows the index keys of its own chunk, and numbers them from 0 on."""

    def run_select(self, q_index, weights, plan):
        if not self.extends():
            return super().run_select(q_index, weights, plan)
        prefix = plan.prefix_lens[self.request_of_row(q_index, plan)].long()[:, None]
        scores = self.scored(q_index, weights, plan)
        place = torch.arange(scores.shape[1], device=scores.device)
        own = scores.gather(1, (place + prefix).clamp(max=scores.shape[1] - 1))
        lengths = self.lengths(q_index, plan) - prefix[:, 0]
        return self.best(own, lengths, plan.layer.topk).to(torch.int32)


@bug(
    "sglang #37625, vllm #55314",
    "decode-mqa4-d64-bf16-p16-k40000-contiguous-gauss-sel16-idx4ties-b1prod",
    "selects-best",
    of_a_tier="decode-mqa4-d64-bf16-p16-k66000.70-shuffled-gauss-sel16-idx4ties-layers1from0-b2prod",
)
class BinOf4096(IndexerParent):
    """Candidates of the threshold's bin, the upper 8 bits of a score, are dropped from the 4096th on."""

    CAPACITY = 4096

    def best(self, scores, lengths, topk):
        place = torch.arange(scores.shape[1], device=scores.device)
        seen = place < lengths[:, None]
        bits = scores.float().nan_to_num(nan=-torch.inf).view(torch.int32)
        ordered = torch.where(bits < 0, ~bits, bits | -(1 << 31)).to(torch.int64) & 0xFFFFFFFF
        coarse = torch.where(seen, ordered >> 24, -1)
        threshold = coarse.sort(1, descending=True).values[:, min(topk, scores.shape[1]) - 1, None]
        in_bin = seen & (coarse == threshold)
        dropped = in_bin & (in_bin.cumsum(1) > self.CAPACITY)
        return super().best(scores.masked_fill(dropped, -torch.inf), lengths, topk)


@bug(
    "ATOM #1362",
    "draft-extend-v2-mqa4-d128-bf16-p16-k37.3.0.16.9.33.1.17.5-n4a4x9-shared-negative-sel16-idx4-b10prod",
    "selects-best",
)
class LastLayerReuses(IndexerParent):
    """The last layer uses the selection of the layer before it instead of that of its own indexer."""

    capabilities = IndexerParent.capabilities.with_changes(sparse=Sparse(topk={16}, indexer=Indexer(heads={4})))
    last = None

    def run_select(self, q_index, weights, plan):
        if plan.layer.layer_id == self.context.layers[-1].layer_id and self.last is not None:
            return self.last
        self.last = super().run_select(q_index, weights, plan)
        return self.last


@bug(
    "vllm #43966",
    "extend-mla16-d128r64-bf16-p16-k3.37.9.17-n9a15.16.2.1-shared-peaked-sel16-idx4ties-b4prod",
    "selection-well-formed",
)
class ShortPrefillIsADecode(OfMode):
    """Requests of up to 4 new rows count as decodes, whose rows select from all keys of the request."""

    THRESHOLD = 4

    def lengths(self, rows, plan):
        right, request = super().lengths(rows, plan), self.request_of_row(rows, plan)
        short = (plan.cu_seqlens_q.diff()[request] <= self.THRESHOLD) & self.extends()
        return torch.where(short, plan.kv_lens[request].long(), right)
