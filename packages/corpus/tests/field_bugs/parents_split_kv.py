"""Split-KV: a row's keys in four splits, partial results in a workspace, and a kernel that merges them."""

from __future__ import annotations

import torch
from plain_backends import FP8, Parts, Tiled, declared
from plain_splits import share_of

MODES = ("decode", "extend", "target-verify", "draft-extend", "draft-extend-v2", "draft-decode")


class SplitKV(Tiled):
    """Splits are as long as the row's request makes them, in tiles of 32 keys: of few keys the first has all."""

    SPLITS, TILE = 4, 32
    capabilities = declared(
        *MODES,
        heads={
            "families": {"mha", "gqa", "mqa"},
            "gqa_ratios": {1, 2, 4, 8},
            "head_dims": {64, 128},
            "heads_by_layer": True,
        },
        precision={"dtypes": {"bf16", "fp16"}},
        kv_pool={"kv_dtypes": FP8, "page_sizes": {1, 4, 16, 64}, "kv_layouts": {"nhd", "hnd"}, "kv_groups": True},
        bounds={
            "max_q_rows": 16,
            "max_topk": 8,
            "max_draft_branches": 4,
            "max_context_len": 4096,
            "kernel_changes_at": {8},
        },
        windows={"decode", "extend"},
        options={"logit_cap": True, "sinks": True},
        server={"takes_empty_batches": True},
    )

    def __init__(self, context):
        super().__init__(context)
        self.most = max(context.max_bs, context.max_num_tokens)
        self.reserve()

    def reserve(self):
        few = {"dtype": torch.float32, "device": self.context.device}
        heads = max(layer.tp_q_head_num for layer in self.context.layers)
        self.outs = torch.zeros(self.most * self.SPLITS * self.row_size(), **few)
        self.lses = torch.zeros(self.most * self.SPLITS * heads, **few)

    def row_size(self):
        return max(layer.tp_q_head_num * layer.v_head_dim for layer in self.context.layers)

    def reserved(self, rows, layer):
        """Partial outputs and log-sum-exps of so many rows: memory that is kept, unless there are too many."""
        shape = (rows, self.SPLITS, layer.tp_q_head_num)
        outs, lses = self.outs, self.lses
        if rows > self.most:
            outs, lses = (torch.zeros(rows * (len(kept) // self.most), device=kept.device) for kept in (outs, lses))
        n = rows * self.SPLITS * layer.tp_q_head_num
        return outs[: n * layer.v_head_dim].view(*shape, layer.v_head_dim), lses[:n].view(shape)

    def split_of(self, index, rows):
        return index // self.length(rows)[:, None]

    def is_of(self, number, index, rows):
        """The keys to which each split attends."""
        return self.split_of(index, rows) == number

    def length(self, rows):
        """Keys in a split of each row."""
        tiles = (rows.kv_lens + self.SPLITS * self.TILE - 1) // (self.SPLITS * self.TILE)
        return tiles.clamp(min=1) * self.TILE

    def parts(self, scores, seen, v, rows):
        outs, lses = self.reserved(len(scores), rows.layer)
        index = torch.arange(seen.shape[1], device=seen.device)
        for number in range(self.SPLITS):
            own = seen & self.is_of(number, index, rows)
            self.store(outs[:, number], lses[:, number], *share_of(scores, own, v), own.any(-1))
        peak = lses.transpose(1, 2)
        return Parts(peak, torch.ones_like(peak), outs.transpose(1, 2))

    def store(self, outs, lses, out, lse, has_keys):
        outs.copy_(out)
        lses.copy_(lse)


class OfTwoModes(SplitKV):
    """Healthy: decode and extend, of which a forward knows the one; two layouts."""

    mode = None
    capabilities = SplitKV.capabilities.with_changes(
        eager={"decode", "extend"},
        graph={"decode", "extend"},
        bounds={"max_topk": 0, "max_draft_branches": 1},
        windows={"modes": {"decode", "extend"}, "in_trees": False},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_groups": True},
    )

    def init_forward_metadata_in_graph(self, batch):
        self.mode = batch.forward_mode
        super().init_forward_metadata_in_graph(batch)

    def table(self, plan):
        return plan.page_table.long()

    def slots(self, plan):
        offset = torch.arange(plan.page_size, device=plan.page_table.device)
        return (self.table(plan)[:, :, None] * plan.page_size + offset).flatten(1)
