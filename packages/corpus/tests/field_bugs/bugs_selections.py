"""Attention over selected keys."""

from __future__ import annotations

import torch
from parents_sparse import Indexed, OfMode
from torch.nn.functional import pad

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBlocksBackend
from attn_testkit.contract import Sparse
from attn_testkit_corpus.faults.catalogue import bug, helper
from attn_testkit_corpus.faults.indexer import IndexerParent
from attn_testkit_corpus.faults.sparse import SparseBlocks, SparseOfWidePages, SparseParent

NOTHING = -(1 << 30)


@bug(
    14,
    "vllm #45324",
    "target-verify-mqa4-d128-bf16-p16-k3.37.9.17-chain7-contiguous-peaked-sel16holes-b4prod",
    "reads-own-kv",
)
class NoKeyIsSlot0(SparseParent):
    """An index of -1 becomes slot 0, and a mask that asks for negative slots finds none."""

    def slots(self, selected, plan):
        return torch.where(selected < 0, 0, super().slots(selected, plan))

    def is_key(self, selected, plan):
        return torch.ones_like(selected, dtype=torch.bool)


@bug(
    14,
    "vllm #47493",
    "decode-mqa4-d64-bf16-p16-k33.24.3-shuffled-gauss-kvlayersinblock-sel1holes-b4prod",
    "reads-own-kv",
)
class FlatNumbers(SparseOfWidePages):
    """Slots are numbered through from the first on, as if pages lay one behind the other."""

    def run(self, q, kv, plan):
        return super().run(q, tuple(self.flat(side) for side in kv), plan)

    @helper
    def flat(self, side):
        pages, size, heads, width = side.shape
        there = side.untyped_storage().nbytes() // side.dtype.itemsize - side.storage_offset()
        most = (there - width) // side.stride(1) + 1
        slots = side.as_strided((min(pages * size, most), heads, width), (side.stride(1), *side.stride()[2:]))
        return slots[None]


@bug(
    14,
    "vllm-ascend #13391",
    "target-verify-mqa4-d128-bf16-p16-k21-chain7-reversed-gauss-sel4of16-b1prod",
    "reads-own-kv",
)
class TailIsLoaded(SparseBlocks):
    """Values of a block behind the length, and of no block, are loaded: their weight of 0 times what lies there."""

    def run(self, q, kv, plan):
        selected = plan.selected
        seen = self.keys_seen(selected, plan)
        keys = self.keys_of(selected).clamp(min=0, max=plan.slot_table.shape[1] - 1)
        there = self.clipped(self.is_block(selected)[..., None].expand_as(keys), self.keys_of(selected), seen)
        keys, there = keys.flatten(1), there.flatten(1)
        slot = plan.slot_table[self.request_of_row(selected, plan)[:, None], keys].long()
        k, v = (side.flatten(0, 1)[slot][:, :, 0].float() for side in kv)
        logits = (q.float() @ k.mT * plan.layer.scaling).masked_fill(~there[:, None], -torch.inf)
        return (torch.softmax(logits, -1).nan_to_num(nan=0.0) @ v).to(q.dtype)


@bug(14, "vllm #54597", "decode-mqa4-d64-bf16-p16-k3.37.9.17-shuffled-one_hot-sel4of16-b7nan", "reads-own-kv")
class NoBlockIsLookedUp(SparseBlocks):
    """A decode looks up no block (-1) in the table: the entry before the request's first."""

    capabilities = SparseBlocks.capabilities.with_changes(eager={"decode"}, graph={"decode"})

    def prepared(self, selected, plan):
        seen, keys = self.keys_seen(selected, plan), self.keys_of(selected)
        return torch.where(keys < seen[:, None, None], keys, NOTHING).flatten(1)

    def is_key(self, selected, plan):
        return selected != NOTHING

    def slots(self, selected, plan):
        columns, request = plan.slot_table.shape[1], self.request_of_row(selected, plan)
        at = request[:, None] * columns + torch.where(selected == NOTHING, 0, selected)
        return plan.slot_table.flatten()[at.clamp(min=0)].long()


@bug(14, "ATOM #1343", "extend-mla16-d128r64-bf16-p16-k7x2-n16a17.15-chunks3-shared-one_hot-sel1holesempty-b5prod")
class WindowAtTheHead(SparseParent):
    """In a prefill with a prefix two writers fill a row's list from its head on; what is behind them stays."""

    extends = False

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.extends = batch.forward_mode == "extend"

    def prepared(self, selected, plan):
        if not self.extends:
            return selected
        count = (selected >= 0).sum(1, keepdim=True)
        window = (count // 4).clamp(min=1)
        column = torch.arange(selected.shape[1], device=selected.device)
        has_prefix = plan.prefix_lens[self.request_of_row(selected, plan)][:, None] > 0
        lost = has_prefix & (column >= count - window)
        return torch.where(lost, torch.zeros_like(selected), selected)


@bug(14, "ATOM #1591", "decode-mla16-d128r64-bf16-p16-k0.1.16-shared-mean-sel16-b4stale")
class TopkIs1024(SparseParent):
    """Lists have 1024 columns whatever the layer selects, and as many keys as a row may see count, up to that."""

    capabilities = SparseParent.capabilities.with_changes(sparse=Sparse(topk={16, 64}))

    def prepared(self, selected, plan):
        return pad(selected.clamp(min=0), (0, max(0, 1024 - selected.shape[1])))

    def is_key(self, selected, plan):
        column = torch.arange(selected.shape[1], device=selected.device)
        return column < self.keys_seen(selected, plan)[:, None]


@bug(
    14,
    "local-inference-lab vllm #715",
    "target-verify-mla16-d64r64-bf16-p16-k600.70.12-chain4-shuffled-shifted-sel64-b6prod",
)
class TailBehindTopk(SparseParent):
    """Of a row that selects all its keys, those of its unfinished pool of 4 lie behind the columns that count."""

    def is_key(self, selected, plan):
        seen = self.keys_seen(selected, plan)[:, None]
        tail = (selected >= seen // 4 * 4) & (seen < selected.shape[1])
        return super().is_key(selected, plan) & ~tail


@bug(
    14,
    "ATOM #1831",
    "target-verify-mqa4-d128-bf16-p16-k3.37.9.17-chain7-contiguous-peaked-sel16holes-b4prod",
    "reads-own-kv",
)
class NoKeyIsAnAddress(SparseParent):
    """-1 goes to the kernel as a slot: that before the pool's first, here its last."""

    def slots(self, selected, plan):
        return torch.where(selected < 0, -1, super().slots(selected, plan))

    def is_key(self, selected, plan):
        return torch.ones_like(selected, dtype=torch.bool)


@bug(15, "sglang-jax #1376", "decode-mqa4-d128-bf16-p64-k133.3.0.64.9.33.1.17.5-shuffled-mean-sel8of16holes-b10nan")
class PageAsBlock(SparseBlocks):
    """A selected block has as many keys as a page."""

    capabilities = SparseBlocks.capabilities.with_changes(kv_pool={"page_sizes": {16, 64}})

    def keys_of(self, selected):
        size = self.context.page_size
        return selected[..., None].long() * size + torch.arange(size, device=selected.device)


@bug(
    15,
    "vllm #51323",
    "decode-mla16-d128r32-bf16-p16-k0.1.16-contiguous-mean-sel16-idx4-b4prod",
    "selection-well-formed",
    execution="graph",
)
class TailOfLastStep(IndexerParent):
    """Places of a row without a key are not written: they hold what an earlier step selected."""

    def __init__(self, context):
        super().__init__(context)
        few = {"dtype": torch.int32, "device": context.device}
        self.kept = {
            layer.layer_id: torch.full((context.max_num_tokens, layer.topk), -1, **few) for layer in context.layers
        }

    def run_select(self, q_index, weights, plan):
        new = super().run_select(q_index, weights, plan)
        kept = self.kept[plan.layer.layer_id]
        if len(new) > len(kept):
            return new
        kept = kept[: len(new)]
        kept.copy_(torch.where(new >= 0, new, kept))
        return kept.clone()


@bug(
    15,
    "vllm #52512",
    "extend-mqa4-d128-bf16-p16-k0.1.16-n1a1x3-shared-one_hot-sel16-idx4reuse-b6small",
    "selection-well-formed",
)
class DenseThatIsNot(OfMode):
    """A prefill of requests with at most topk keys selects nothing, for a dense path that nobody takes."""

    def run_select(self, q_index, weights, plan):
        right = super().run_select(q_index, weights, plan)
        if not self.extends():
            return right
        return torch.where(plan.kv_lens.max() <= plan.layer.topk, torch.full_like(right, -1), right)


# cudnn-frontend #407: the top-k writes pairs if topk is larger than the threads of a block (512 here).
@bug(
    16,
    "cudnn-frontend #407",
    "decode-mqa4-d64-bf16-p16-k7050.70-shuffled-gauss-sel705-idx4ties-layers1from0-b2prod",
    "completes",
)
class PairsOfOddTopk(Indexed):
    """An odd topk that is larger than a block's threads does not compile."""

    capabilities = Indexed.capabilities.with_changes(sparse={"topk": {16, 64, 705}})

    def best(self, scores, sees, layer):
        if layer.topk > 512 and layer.topk % 2:
            raise RuntimeError(f"assert self.top_k % vecsize_out == 0, with top_k={layer.topk}")
        return super().best(scores, sees, layer)


# ik_llama.cpp #2095: a layer without an index cache is not sparse.
@bug(
    16,
    "ik_llama.cpp #2095",
    "draft-extend-mqa4-d64-bf16-p64-k2112.70.12-n2a2x3-interleaved-negative-sel2048-idx4reuse-b4prod-empty_batches",
)
class DenseWithoutIndexKeys(Indexed):
    """A layer that reuses a selection attends to all keys."""

    def run(self, q, kv, plan):
        if not plan.layer.reuses_selection:
            return super().run(q, kv, plan)
        table = plan.slot_table[self.request_of_row(q, plan)].long()
        key = torch.arange(table.shape[1], device=table.device)
        return self.attend_all(q, kv, plan, table, key < self.keys_seen(q, plan)[:, None])[0]


# 15, cudnn-frontend #804: exp(-inf - -inf), where the first tile of the online softmax is masked whole.
@bug(
    18,
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
    18,
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
