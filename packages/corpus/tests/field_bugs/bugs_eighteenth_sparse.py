"""Selections and indexers; bugs of the eighteenth set.

The number before each class is that of ``eighteenth_set.md``. The case of a class without one costs too much.
"""

from __future__ import annotations

import torch

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend, TorchNativeSparseBlocksBackend
from attn_testkit.contract import INDEX_PAGE, ForwardMode
from attn_testkit_corpus.faults.catalogue import bug, helper

KERNEL_PAGE = 16
LONG = 4096


# 15, cudnn-frontend #804: exp(-inf - -inf), where the first tile of the online softmax is masked whole.
@bug(
    "cudnn-frontend #804",
    "extend-gqa3x2-d128-fp32-p64-k600.70.12-n2a2.3.1-chunks3-reversed-one_hot-kvfp8e4m3-sink-sel16of16holes-b6nan",
    "finite",
)
class FirstBlockIsMasked(TorchNativeSparseBlocksBackend):
    """The online softmax over blocks gives NaN if the first one has no key."""

    def attend(self, q, kv, plan, slot, is_key):
        layer, there = plan.layer, is_key[..., None, None]
        k, v = (each.masked_fill(~there, 0.0) for each in self.read(kv, slot, layer))
        rows = q.float().view(len(q), -1, layer.q_per_kv, q.shape[-1])
        logits = torch.einsum("thgd,tnhd->thgn", rows, k) * layer.scaling
        logits = logits.masked_fill(~there.permute(0, 2, 3, 1), -torch.inf)
        top = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
        total, acc = torch.zeros_like(top), 0.0
        for at in range(0, logits.shape[-1], self.block):
            part = logits[..., at : at + self.block]
            higher = torch.maximum(top, part.amax(-1, keepdim=True))
            weights, kept = torch.exp(part - higher), torch.exp(top - higher)
            total = total * kept + weights.sum(-1, keepdim=True)
            acc = acc * kept + torch.einsum("thgn,tnhd->thgd", weights, v[:, at : at + self.block])
            top = higher
        if layer.sinks is not None:
            sinks = layer.sinks.float().view(-1, layer.q_per_kv, 1)
            higher = torch.maximum(top, sinks)
            total = total * torch.exp(top - higher) + torch.exp(sinks - higher)
            acc, top = acc * torch.exp(top - higher), higher
        return (acc / total).flatten(1, 2).to(q.dtype), (top + torch.log(total)).flatten(1)


# 16, flash-linear-attention #845: ``if moba_topk <= 0: return flash_attn_varlen_func(..., causal=True)``.
@bug(
    "flash-linear-attention #845",
    "decode-gqa2x2-d128-fp32-p1-k3.21.5.17-shuffled-one_hot-kvfp8e4m3-sel1of16-b4prod-padded_tokens",
)
class OneBlockIsDense(TorchNativeSparseBlocksBackend):
    """With one block for each row, rows attend to all keys that they may see."""

    def run_return_lse(self, q, kv, plan):
        if plan.layer.topk > 1:
            return super().run_return_lse(q, kv, plan)
        table = self.own_columns(plan)[self.request_of_row(q, plan)].long()
        is_key = torch.arange(table.shape[1], device=q.device) < self.keys_seen(q, plan)[:, None]
        return self.attend_all(q, kv, plan, table, is_key)


# 17, SwiftLM #159: the causal mask is built from the offset of the cache after its update.
@bug(
    "SwiftLM #159",
    "target-verify-mla16-d128r32-fp16-p64-k69-chain2-shared-one_hot-kvfp8e4m3-sel16-idx4gauss-b4prod-padded_tokens",
    "selection-well-formed",
)
class MaskAfterUpdate(TorchNativeSparseBackend):
    """A row may select any key of the step, also those behind itself."""

    def scored(self, q_index, weights, plan):
        scores, _ = super().scored(q_index, weights, plan)
        return scores, plan.kv_lens[self.request_of_row(q_index, plan)]


# 18, vllm #54359: ids of blocks, and offsets of the smaller pages that the kernels use.
@bug("vllm #54359", "decode-mla16-d128r32-fp16-p64-k69-interleaved-mean-sink-sel1-idx4ties-b1prod", "index-stored")
class PagesOfKernel(TorchNativeSparseBackend):
    """Index pages of 64 tokens are addressed as pages of 16."""

    @helper
    def place(self, slots):
        return slots // INDEX_PAGE * KERNEL_PAGE + slots % KERNEL_PAGE

    def write_index(self, k_index, plan):
        self.context.index_pool.store(plan.layer.layer_id, self.place(plan.out_cache_loc.long()), k_index)

    def scores_of_slots(self, q_index, weights, layer, slots=None):
        if slots is None:
            pages = len(self.context.index_pool.get_keys(layer.layer_id))
            slots = torch.arange(pages * INDEX_PAGE, device=q_index.device)
        return super().scores_of_slots(q_index, weights, layer, self.place(slots))


# 19, aiter #2901: ``in += rowStart`` is missing on the path of long rows.
class LongRowsFromFirstColumn(TorchNativeSparseBackend):
    """In a long prefill each row reads the scores of the first packed keys."""

    is_long = False

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        extends = batch.forward_mode is ForwardMode.EXTEND
        self.is_long = extends and sum(batch.extend_prefix_lens_cpu) + sum(batch.extend_seq_lens_cpu) >= LONG

    def scored(self, q_index, weights, plan):
        if not self.is_long:
            return super().scored(q_index, weights, plan)
        columns = self.own_columns(plan).shape[1]
        scores = self.scores_of_slots(q_index, weights, plan.layer, plan.kv_indices[:columns])
        return scores, self.keys_seen(q_index, plan)


# 20, colibri #1554: the schedule of a verify is chosen by ``n > 1 && start_pos > 0``.
@bug(
    "colibri #1554",
    "extend-mha2-d32-fp32-p64-k600.70.12-n2a2.3.1-contiguous-shifted-sel64-idx4ties-b4small-empty_batches",
    "selects-best",
)
class ResumedAsVerify(TorchNativeSparseBackend):
    """Rows of a prefill that continues a prefix do not score the keys of earlier rows of the step."""

    extends = False

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.extends = batch.forward_mode is ForwardMode.EXTEND

    def scored(self, q_index, weights, plan):
        scores, sees = super().scored(q_index, weights, plan)
        if not self.extends:
            return scores, sees
        prefix = plan.prefix_lens[self.request_of_row(q_index, plan)][:, None]
        key = torch.arange(scores.shape[1], device=scores.device)
        of_step = (prefix > 0) & (key >= prefix) & (key < sees[:, None] - 1)
        return scores.masked_fill(of_step, -torch.inf), sees


# 21, vllm #49897: bits of NaN are sorted above infinity, and the scores of a tile are not hidden behind the row's end.
@bug(
    "vllm #49897",
    "decode-mla16-d128r32-fp16-p64-k69-interleaved-mean-sink-sel1-idx4ties-b1prod",
    "selection-well-formed",
)
class NanIsBest(TorchNativeSparseBackend):
    """Keys that a row does not see are selected if their scores are NaN, and dropped afterwards."""

    def run_select(self, q_index, weights, plan):
        scores, sees = self.scored(q_index, weights, plan)
        topk, columns = plan.layer.topk, scores.shape[1]
        key = torch.arange(columns, device=scores.device)
        seen = torch.where((key < sees[:, None]) | scores.isnan(), scores, -torch.inf)
        best = seen.topk(min(topk, columns), 1).indices
        table = self.own_columns(plan)[self.request_of_row(q_index, plan)].long()
        found = torch.where(best < sees[:, None], self.indices(best, table), -1).to(torch.int32)
        return torch.nn.functional.pad(found, (0, topk - found.shape[1]), value=-1)
