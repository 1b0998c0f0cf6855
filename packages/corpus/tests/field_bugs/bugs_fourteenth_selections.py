"""Selected keys; bugs of the fourteenth set."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from attn_testkit.contract import Sparse
from attn_testkit_corpus.faults.catalogue import bug, helper
from attn_testkit_corpus.faults.sparse import SparseBlocks, SparseOfWidePages, SparseParent

NOTHING = -(1 << 30)


@bug(
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


@bug("vllm #47493", "decode-mqa4-d64-bf16-p16-k33.24.3-shuffled-gauss-kvlayersinblock-sel1holes-b4prod", "reads-own-kv")
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
    "ATOM #1595",
    "extend-mqa4-d64-bf16-p16-k9.70.1-n2a2x3-contiguous-gauss-sel64empty-b4prod-padded_tokens",
    "completes",
)
class PaddedRowsAbort(SparseParent):
    """An eager prefill with more rows than its plan aborts: it has an offset for each planned row and one more."""

    capabilities = SparseParent.capabilities.with_changes(server={"takes_more_rows": True})
    planned = None

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.planned = len(batch.input_ids) if batch.forward_mode == "extend" else None

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.planned = None

    def run(self, q, kv, plan):
        if self.planned is not None and len(q) != self.planned:
            raise RuntimeError("kv_indptr_prefix length must be N+1")
        return super().run(q, kv, plan)


@bug("ATOM #1058", "draft-extend-mqa4-d64-bf16-p16-k0.1.16-n6a6x3-shuffled-gauss-sel1-b3prod", "reads-own-kv")
class AsManyRowsEach(SparseParent):
    """Each request has as many rows as the plan's largest, of a builder for decode and drafts."""

    capabilities = SparseParent.capabilities.with_changes(
        eager={"decode", "target-verify", "draft-extend"}, graph={"decode", "target-verify", "draft-extend"}
    )

    def request_of_row(self, selected, plan):
        row = torch.arange(len(selected), device=selected.device)
        return (row // plan.max_q_len).clamp(max=len(plan.kv_lens) - 1)


@bug("vllm-ascend #13391", "target-verify-mqa4-d128-bf16-p16-k21-chain7-reversed-gauss-sel4of16-b1prod", "reads-own-kv")
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


@bug("vllm #54597", "decode-mqa4-d64-bf16-p16-k3.37.9.17-shuffled-one_hot-sel4of16-b7nan", "reads-own-kv")
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


@bug("ATOM #1343", "extend-mla16-d128r64-bf16-p16-k7x2-n16a17.15-chunks3-shared-one_hot-sel1holesempty-b5prod")
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


@bug("ATOM #1591", "decode-mla16-d128r64-bf16-p16-k0.1.16-shared-mean-sel16-b4stale")
class TopkIs1024(SparseParent):
    """Lists have 1024 columns whatever the layer selects, and as many keys as a row may see count, up to that."""

    capabilities = SparseParent.capabilities.with_changes(sparse=Sparse(topk={16, 64}))

    def prepared(self, selected, plan):
        return pad(selected.clamp(min=0), (0, max(0, 1024 - selected.shape[1])))

    def is_key(self, selected, plan):
        column = torch.arange(selected.shape[1], device=selected.device)
        return column < self.keys_seen(selected, plan)[:, None]


@bug(
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
