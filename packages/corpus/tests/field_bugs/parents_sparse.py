"""Healthy backends with indexers or given selections."""

from __future__ import annotations

import torch

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.contract import INDEX_PAGE, ForwardMode, Sparse
from attn_testkit.contract.index_pool import index_scales
from attn_testkit_corpus.faults.indexer import IndexerParent

PAGE, WIDTH, PAGE_BYTES = 64, 128, 64 * 132


class OfMode(IndexerParent):
    """A launcher that knows its mode."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode

    def extends(self):
        return self.mode == "extend"


class Indexed(TorchNativeSparseBackend):
    """Healthy: the adapter in plain torch, with its parts apart. It knows the mode of the step."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        heads={"families": {"mqa", "mla"}, "gqa_ratios": {4, 16}, "head_dims": {64, 128, 512}, "mla_rope_dims": {64}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16, 64}},
        options={"sinks": False},
        lse=None,
    )

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode
        if self.mode is ForwardMode.EXTEND:
            self.new_lens = list(batch.extend_seq_lens_cpu)
            self.total_keys = sum(batch.extend_prefix_lens_cpu) + sum(self.new_lens)

    def extends(self):
        return self.mode is ForwardMode.EXTEND

    def index_slots(self, plan):
        """[bs, columns]: the slot of each index key of each request."""
        return plan.slot_table

    def scored(self, q_index, weights, plan):
        request, table = self.request_of_row(q_index, plan), self.index_slots(plan).long()
        if table.numel() < self.context.kv_pool.num_slots:
            listed = self.scores_of_slots(q_index, weights, plan.layer, table.flatten())
            scores = listed.view(len(request), *table.shape)[torch.arange(len(request), device=table.device), request]
        else:
            scores = self.scores_of_slots(q_index, weights, plan.layer).gather(1, table[request])
        return scores, self.keys_seen(q_index, plan)

    def best(self, scores, sees, layer):
        """[T, k] int64: keys of the best scores. ``scores`` [T, keys]: -inf for keys that a row does not see."""
        return scores.topk(min(layer.topk, scores.shape[1]), 1).indices

    def run_select(self, q_index, weights, plan):
        scores, sees = self.scored(q_index, weights, plan)
        key = torch.arange(scores.shape[1], device=scores.device)
        best = self.best(torch.where(key < sees[:, None], scores, -torch.inf), sees, plan.layer)
        found = torch.where(best < sees[:, None], best, -1).to(torch.int32)
        return torch.nn.functional.pad(found, (0, plan.layer.topk - found.shape[1]), value=-1)

    def padded(self, selected, rows):
        """Padded rows after the last selection select no key."""
        return torch.nn.functional.pad(selected, (0, 0, 0, rows - len(selected)), value=-1)

    def store(self, slots, k_index, layer_id, stored):
        """Store the rows for which ``stored`` [T] is True, and leave all other memory as it is."""
        pool = self.context.index_pool
        scales = index_scales(k_index, pool.scale)
        keys = (k_index.float() / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        slots = torch.where(stored, slots.long(), 0)
        at = slots // INDEX_PAGE, slots % INDEX_PAGE
        all_keys, all_scales = pool.get_keys(layer_id).view(torch.uint8), pool.get_scales(layer_id)
        all_keys.index_put_(at, torch.where(stored[:, None], keys, all_keys[at]))
        all_scales.index_put_(at, torch.where(stored, scales, all_scales[at]))


class Given(Indexed):
    """Healthy: selections are given."""

    capabilities = Indexed.capabilities.with_changes(
        sparse=Sparse(topk={16, 64, 2048}, holes=True, empty_rows=True, fewer_rows=True, any_padding=True)
    )

    def prepared(self, selected, plan):
        """``selected`` [T, topk] as the kernel reads it."""
        return selected

    def run(self, q, kv, plan):
        selected = self.prepared(self.padded(plan.selected, len(q)), plan)
        return self.attend_all(q, kv, plan, self.slots(selected, plan), selected >= 0)[0]
