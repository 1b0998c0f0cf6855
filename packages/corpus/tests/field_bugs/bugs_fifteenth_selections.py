"""Selections and indexers; bugs of the fifteenth set."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from attn_testkit.contract import Indexer, Sparse
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.indexer import IndexerParent
from attn_testkit_corpus.faults.sparse import SparseBlocks, SparseParent

_PAGE, _WIDTH, _PAGE_BYTES = 64, 128, 64 * 132


class OfMode(IndexerParent):
    """A launcher that knows its mode."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode

    def extends(self):
        return self.mode == "extend"


@bug(
    "vllm #51318",
    "decode-mla16-d128r64-bf16-p16-k7x2-reversed-gauss-sel16-layers2from5-b2prod",
    "replay-follows-batch",
    execution="graph",
)
class PackedByActiveWidth(SparseParent):
    """A plan packs rows of indices as wide as the longest row is; the graph reads them with the width at capture."""

    capabilities = SparseParent.capabilities.with_changes(
        eager={"decode", "target-verify"}, graph={"decode", "target-verify"}, sparse=Sparse(topk={16, 64})
    )
    eager = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        most, device = max(self.capabilities.sparse.topk), self.context.device
        self.packed = torch.full((max_num_tokens * most + most,), -1, dtype=torch.int32, device=device)
        self.active = torch.zeros(1, dtype=torch.int64, device=device)

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False
        most = self.context.layers[0].topk
        longest = batch.seq_lens[: batch.batch_size].max() + self.context.num_draft_tokens if batch.batch_size else 0
        self.active[0] = most if in_capture else (longest.clamp(max=most) if batch.batch_size else most)

    def prepared(self, selected, plan):
        if self.eager:
            return selected
        rows, width = selected.shape
        row, column = torch.arange(rows, device=selected.device)[:, None], torch.arange(width, device=selected.device)
        at = torch.where(column < self.active, row * self.active + column, len(self.packed) - 1)
        self.packed.index_put_((at.flatten(),), selected.flatten())
        self.packed[-1:] = -1
        there = column < (selected >= 0).sum(1, keepdim=True)
        return torch.where(there, self.packed[: rows * width].view(rows, width), -1)


@bug(
    "vllm #57388",
    "decode-mqa4-d64-bf16-p16-k32.128.64.16.63-shared-one_hot-sel16-b6prod-multi_mode",
    "buckets-independent",
    execution="graph",
)
class WorkspaceOfBoth(SparseParent):
    """An eager prefill uses the workspace in which the decode graph keeps what it made before its capture."""

    capabilities = SparseParent.capabilities.with_changes(
        eager={"decode", "extend"}, graph={"decode"}, sparse=Sparse(topk={16, 64})
    )
    eager = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.workspace = torch.arange(max(self.capabilities.sparse.topk), device=self.context.device)

    def init_forward_metadata(self, batch):
        self.eager = True
        self.prefill = batch.forward_mode == "extend"
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False

    def prepared(self, selected, plan):
        if self.eager:
            if self.prefill and hasattr(self, "workspace"):
                some = selected.flatten()[: len(self.workspace)]
                self.workspace[: len(some)].copy_(some)
            return selected
        order = self.workspace[: selected.shape[1]].clamp(0, selected.shape[1] - 1)
        return selected[:, order]


@bug("sglang-jax #1376", "decode-mqa4-d128-bf16-p64-k133.3.0.64.9.33.1.17.5-shuffled-mean-sel8of16holes-b10nan")
class PageAsBlock(SparseBlocks):
    """A selected block has as many keys as a page."""

    capabilities = SparseBlocks.capabilities.with_changes(kv_pool={"page_sizes": {16, 64}})

    def keys_of(self, selected):
        size = self.context.page_size
        return selected[..., None].long() * size + torch.arange(size, device=selected.device)


@bug(
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


@bug("aiter #5525", "decode-mla16-d128r32-bf16-p16-k0.1.16-contiguous-mean-sel16-idx4-b4prod", "selects-best")
class RowsOf132(IndexerParent):
    """Keys of a page are read as if each had its scale behind it (in the thread: the other way round)."""

    def gathered(self, slots, layer_id):
        _, scales = super().gathered(slots, layer_id)
        buffer = self.context.index_pool.get_index_buffer(layer_id)
        rows = buffer.view(len(buffer), _PAGE, _WIDTH + 4)[..., :_WIDTH]
        keys = rows[slots // _PAGE, slots % _PAGE]
        return keys.contiguous().view(torch.float8_e4m3fn).float(), scales


@bug("TileOPs #2149", "decode-mqa4-d128-bf16-p16-k1.2.5.9.14.2.30-shuffled-gauss-sel16holesempty-b8stale", "finite")
class TileOfLastRow(SparseParent):
    """No key leaves its place of the tile as the last row filled it; at first it holds anything."""

    def run(self, q, kv, plan):
        selected = self.prepared(plan.selected, plan)
        slot, there = self.slots(selected, plan), self.is_key(selected, plan)
        row = torch.arange(len(selected), device=selected.device)[:, None]
        last = torch.where(there, row, -1).cummax(0).values
        k, v = (each.flatten(0, 1)[slot][:, :, 0].float() for each in kv)
        column = torch.arange(selected.shape[1], device=selected.device)
        v = v[last.clamp(min=0), column].masked_fill((last < 0)[..., None], torch.nan)
        k = k.masked_fill(~there[..., None], 0.0)
        logits = (q.float() @ k.mT * plan.layer.scaling).masked_fill(~there[:, None], -torch.inf)
        weights = torch.softmax(logits, -1).nan_to_num(nan=0.0)
        return (weights @ v).to(q.dtype)


@bug(
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


@bug(
    "sglang #30645",
    "decode-mqa4-d64-bf16-p16-k20480.70-shuffled-gauss-sel2048-idx4ties-layers1from0-b2prod",
    "selection-well-formed",
)
class TiesOf1024(IndexerParent):
    """At most 1024 candidates that tie at the threshold are kept; the rest of the row is -1."""

    CAPACITY = 1024
    capabilities = IndexerParent.capabilities.with_changes(
        sparse=Sparse(topk={16, 2048}, indexer=Indexer(heads={4}, reuses_selections=True))
    )

    def best(self, scores, lengths, topk):
        right = super().best(scores, lengths, topk)
        there = right >= 0
        chosen = scores.gather(1, right.clamp(min=0)).masked_fill(~there, torch.inf)
        threshold = chosen.amin(1, keepdim=True)
        tied = there & (chosen == threshold)
        full = (lengths > topk)[:, None]
        kept = torch.where(full & tied & (tied.cumsum(1) > self.CAPACITY), -1, right)
        return kept.gather(1, (kept < 0).to(torch.int8).argsort(dim=1, stable=True))


@bug(
    "vllm #46074",
    "target-verify-mqa4-d64-bf16-p16-k9.64.1-chain4-shuffled-gauss-sel16-idx4-b4prod-context_of_prefixes",
    "completes",
)
class TableOneColumnShort(OfMode):
    """The buffer of tables repeated for each row has a column for each page of a context, and the table has more."""

    capabilities = IndexerParent.capabilities.with_changes(
        server={"context_len": {"all", "prefix"}}, eager={"decode", "target-verify"}, graph={"decode", "target-verify"}
    )

    def scored(self, q, weights, plan):
        table, buffer = -(-plan.slot_table.shape[1] // _PAGE), -(-self.context.max_context_len // _PAGE)
        if self.mode.is_target_verify() and table > buffer:
            raise RuntimeError(
                f"The expanded size of the tensor ({buffer}) must match the existing size ({table}) at dimension 1"
            )
        return super().scored(q, weights, plan)


@bug("aiter #4376", "decode-mla16-d128r64-bf16-p16-k15.16.17-contiguous-shifted-sel16-idx4ties-b4stale", "repeatable")
class TiesByArrival(IndexerParent):
    """Keys that tie at the threshold are taken in an order that is another one in each call."""

    def __init__(self, context):
        super().__init__(context)
        self.calls = torch.zeros(1, dtype=torch.int64, device=context.device)

    def best(self, scores, lengths, topk):
        self.calls += 1
        place = torch.arange(scores.shape[1], device=scores.device)
        arrival = ((place + self.calls) * 40503 % 65537).argsort(stable=True)
        seen = torch.where(place < lengths[:, None], scores, -torch.inf)[:, arrival]
        order = arrival[seen.sort(dim=1, descending=True, stable=True).indices[:, :topk]]
        order = pad(order, (0, topk - order.shape[1]), value=scores.shape[1])
        return torch.where(order < lengths[:, None], order, -1)
