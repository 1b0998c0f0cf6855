"""The parent of faults of sparse attention: gather by row, with a hook for each step that can go wrong."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import (
    AttentionLayer,
    Bounds,
    Capabilities,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    KVSplit,
    LogSumExp,
    Needs,
    PackedRows,
    Precision,
    Promises,
    Sparse,
)
from attn_testkit.contract.row_format import in_tiles

_ALL = frozenset(ForwardMode)
_TILE = 128


class SparseParent(KernelBackend):
    """A right backend with few capabilities: ``prepared`` returns the indices, ``is_key`` which of them count. It
    shares no code with the adapters: otherwise a mistake there would be in every seeded bug.
    """

    capabilities = Capabilities(
        eager=_ALL,
        graph=_ALL,
        heads=HeadShapes(families={"mqa", "mla"}, gqa_ratios={4, 16}, head_dims={64, 128}, mla_rope_dims={32, 64}),
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={16}),
        bounds=Bounds(max_q_rows=16, max_topk=1, max_draft_branches=4),
        sparse=Sparse(topk={1, 16, 64}, holes=True, empty_rows=True, any_padding=True),
        needs=Needs(cpu_seq_lens=False),
        promises=Promises(deterministic=True),
    )

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, n]: the indices that are gathered."""
        return selected

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, n] bool: whether an index is a key."""
        return selected >= 0

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, n] int64: the slot of each index; any slot for -1."""
        request = self.request_of_row(selected, plan)
        return plan.slot_table[request[:, None], selected.clamp(min=0).long()].long()

    @override
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        selected = self.prepared(plan.selected, plan)
        slot, there = self.slots(selected, plan), self.is_key(selected, plan)
        k, v = (each.flatten(0, 1)[slot][:, :, 0].float().masked_fill(~there[..., None], 0.0) for each in kv)
        # One KV head: [T, Hq, n], and a row without a key has weights of 0.
        logits = (q.float() @ k.mT * plan.layer.scaling).masked_fill(~there[:, None], -torch.inf)
        weights = torch.softmax(logits, -1).nan_to_num(nan=0.0)
        return (weights @ v).to(q.dtype)

    def request_of_row(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T] int64: request of each row; the last one for padded rows."""
        row = torch.arange(len(selected), device=selected.device)
        found: torch.Tensor = torch.searchsorted(plan.cu_seqlens_q, row, right=True) - 1
        return found.clamp(max=len(plan.kv_lens) - 1)

    def keys_seen(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T] int64: number of keys that each of ``rows`` [T, ...] may see."""
        request, row = self.request_of_row(rows, plan), torch.arange(len(rows), device=rows.device)
        return plan.prefix_lens[request] + row - plan.cu_seqlens_q[request] + 1


class UnionOfRows(SparseParent):
    """Two rows gather the keys of both, and keys of the other row have a weight of 0, as in SGLang's ``union=2``."""

    # A padded row of a draft may have the keys of a later forward, which are not stored yet.
    capabilities = SparseParent.capabilities.with_changes(
        eager=_ALL - {ForwardMode.DRAFT_DECODE},
        graph=_ALL - {ForwardMode.DRAFT_DECODE},
        sparse=Sparse(topk={16, 64}, holes=True, empty_rows=True, index_space="slots"),
    )

    @override
    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected.clamp(min=0).long()

    @override
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        out, row = super().run(q, kv, plan), torch.arange(len(q), device=q.device)
        other = plan.selected[(row ^ 1).clamp(max=len(q) - 1)]
        values = kv[1].flatten(0, 1)[self.slots(other, plan)].masked_fill((other < 0)[..., None, None], 0.0)
        return out + 0.0 * values.sum((1, 2))[:, None]


class SparseWithSums(SparseParent):
    """The parent with log-sum-exps, with fewer selections than rows of q, and with rows of padding."""

    capabilities = SparseParent.capabilities.with_changes(
        sparse={"fewer_rows": True},
        server={"takes_more_rows": True},
        lse=LogSumExp("e", whole=_ALL - {ForwardMode.DRAFT_DECODE}),
    )

    def of_all_rows(self, selected: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, topk]: rows after the last selection belong to no request, and select no key."""
        return torch.nn.functional.pad(selected, (0, 0, 0, rows - len(selected)), value=-1)

    def lse_without_keys(self, lse: torch.Tensor) -> torch.Tensor:
        """[T, Hq]: the log-sum-exp of rows that select no key."""
        return lse

    @override
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        return super().run(q, kv, replace(plan, selected=self.of_all_rows(plan.selected, len(q))))

    @override
    def run_return_lse(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert plan.selected is not None
        slot, there = self.slots(plan.selected, plan), self.is_key(plan.selected, plan)
        keys = kv[0].flatten(0, 1)[slot][:, :, 0].float().masked_fill(~there[..., None], 0.0)
        logits = (q.float() @ keys.mT * plan.layer.scaling).masked_fill(~there[:, None], -torch.inf)
        return self.run(q, kv, plan), self.lse_without_keys(logits.logsumexp(-1))


class SparseOnRanks(SparseWithSums):
    """The parent as one of R ranks: it attends to the selected keys that it has, at their local indices."""

    capabilities = SparseWithSums.capabilities.with_changes(
        eager=_ALL - {ForwardMode.DRAFT_DECODE},
        graph=_ALL - {ForwardMode.DRAFT_DECODE},
        heads={"families": {"mqa"}, "gqa_ratios": {4}, "head_dims": {64}, "mla_rope_dims": set()},
        kv_pool={"page_sizes": {4, 16}},
        bounds={"max_q_rows": 8, "max_draft_branches": 1, "max_context_len": 1 << 13},
        lse=LogSumExp("e", ranks=_ALL - {ForwardMode.DRAFT_DECODE}),
    )

    def on_rank(self, selected: torch.Tensor, own: KVSplit) -> torch.Tensor:
        """[T, n] bool: True for positions whose keys the rank has."""
        return own.holds(selected, torch.zeros_like(selected))

    def local(self, positions: torch.Tensor, own: KVSplit) -> torch.Tensor:
        """[T, n]: index on the rank of each of ``positions`` [T, n]."""
        return own.index(positions)

    @override
    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        there = super().is_key(selected, plan)
        return there & self.on_rank(selected, plan.part) if plan.part.own_pool else there

    @override
    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        positions = selected.clamp(min=0)
        return super().slots(self.local(positions, plan.part) if plan.part.own_pool else positions, plan)


class SparseOfWidePages(SparseParent):
    """The parent in pools whose pages are farther apart than their slots are long."""

    capabilities = SparseParent.capabilities.with_changes(
        kv_pool={"kv_layouts": {"nhd", "padded-pages", "layers-in-block"}}
    )


class SparseOfVLLM(SparseParent):
    """The parent in batches whose padded requests have neither rows nor keys."""

    capabilities = SparseParent.capabilities.with_changes(
        eager={"target-verify", "draft-extend-v2"}, graph={"target-verify", "draft-extend-v2"},
        server={"padded_requests": {"nothing"}, "verify_lens": {"all"}},
    )  # fmt: skip


class PackedRowsParent(SparseParent):
    """The parent over packed rows, whose planes it splits by its own arithmetic."""

    capabilities = SparseParent.capabilities.with_changes(
        heads={"families": {"mla"}, "gqa_ratios": {4}, "head_dims": {256}, "mla_rope_dims": {64}},
        kv_pool={"kv_dtypes": {"fp8_ds_mla", "fp8_ds_mla_pow2"}},
        sparse=Sparse(topk={16}, holes=True, empty_rows=True, any_padding=True),
    )

    def packed(self, layer: AttentionLayer) -> PackedRows:
        """The format of the rows of a layer."""
        found = self.context.kv_pool.rows_of(layer)
        assert found is not None
        return found

    def split(self, rows: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers, scales and rope of ``rows`` [slots, bytes]."""
        scales = latent + latent // _TILE * 4
        return (
            rows[:, :latent].view(torch.float8_e4m3fn),
            rows[:, latent:scales].view(torch.float32),
            self.rope(rows, scales),
        )

    def rope(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """[slots, rope]: the unscaled part, from byte ``first`` on."""
        return rows[:, first:].view(torch.bfloat16)

    def scales(self, scales: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """[T, n, tiles]: scales of the keys in ``slot`` [T, n]. ``scales`` [slots, tiles]."""
        return scales[slot]

    def rounded(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys in the dtype of the products."""
        return keys

    @override
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        selected = self.prepared(plan.selected, plan)
        slot, there = self.slots(selected, plan), self.is_key(selected, plan)[..., None]
        keys = self.rounded(self.keys(kv[0], slot, plan.layer).masked_fill(~there, 0.0))
        logits = (q.float() @ keys.mT * plan.layer.scaling).masked_fill(~there.mT, -torch.inf)
        weights = torch.softmax(logits, -1).nan_to_num(nan=0.0)
        return (weights @ self.values(keys, plan.layer)).to(q.dtype)

    def keys(self, rows: torch.Tensor, slot: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[T, n, width] float32: the keys in ``slot`` [T, n]. ``rows`` [pages, page_size, 1, bytes]: of K."""
        numbers, scales, rope = self.split(rows.flatten(0, 2), layer.kv_lora_rank)
        of_tiles = self.scales(scales, slot).repeat_interleave(_TILE, -1)
        # Not every device can gather FP8.
        held = numbers.view(torch.uint8)[slot].view(numbers.dtype).float() * of_tiles
        of_rope = in_tiles(rope.view(torch.uint8), rope.dtype.itemsize)[slot].flatten(2).view(rope.dtype)
        return torch.cat([held, of_rope.float()], -1)

    def values(self, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[T, n, Dv]: the values of ``keys`` [T, n, width]."""
        return keys[..., : layer.kv_lora_rank]


class GroupedSparse(SparseParent):
    """The parent for several KV heads: ``kv_head_of`` says which of them a query head reads."""

    capabilities = SparseParent.capabilities.with_changes(heads={"families": {"gqa"}, "gqa_ratios": {4, 16}})

    def kv_head_of(self, heads: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[Hq] int64: KV head of each query head."""
        return heads // plan.layer.q_per_kv

    @override
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        selected = self.prepared(plan.selected, plan)
        slot, there = self.slots(selected, plan), self.is_key(selected, plan)[..., None, None]
        k, v = (each.flatten(0, 1)[slot].float().masked_fill(~there, 0.0) for each in kv)
        head = self.kv_head_of(torch.arange(q.shape[1], device=q.device), plan)
        logits = torch.einsum("thd,tnhd->thn", q.float(), k[:, :, head]) * plan.layer.scaling
        weights = logits.masked_fill(~there[:, None, :, 0, 0], -torch.inf).softmax(-1).nan_to_num(nan=0.0)
        return torch.einsum("thn,tnhd->thd", weights, v[:, :, head]).to(q.dtype)


class SparseBlocks(SparseParent):
    """The parent for selected blocks: ``keys_of`` gives the keys of each row, ``clipped`` those that it may see."""

    block = 16
    capabilities = SparseParent.capabilities.with_changes(
        heads={"families": {"mqa"}, "gqa_ratios": {4}, "mla_rope_dims": set()},
        sparse=Sparse(topk={4, 8}, block=block, holes=True),
    )

    def keys_of(self, selected: torch.Tensor) -> torch.Tensor:
        """[T, topk, block] int64: places of the keys of each block."""
        return selected[..., None].long() * self.block + torch.arange(self.block, device=selected.device)

    def clipped(self, there: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[T, topk, block] bool: ``there`` for the keys that a row may see, of which there are ``seen`` [T]."""
        return there & (keys < seen[:, None, None])

    def is_block(self, selected: torch.Tensor) -> torch.Tensor:
        """[T, topk] bool: whether an index is a block."""
        return selected >= 0

    @override
    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        seen = self.keys_seen(selected, plan)
        keys = self.keys_of(selected)
        there = self.clipped(self.is_block(selected)[..., None].expand_as(keys), keys, seen)
        keys = keys.clamp(min=0, max=plan.slot_table.shape[1] - 1)
        return torch.where(there, keys, -1).flatten(1)


class SparseOfHeads(SparseBlocks):
    """The parent for blocks that each KV head selects for itself: ``set_of`` gives the selection of a query head."""

    capabilities = SparseBlocks.capabilities.with_changes(
        heads={"families": {"gqa"}, "gqa_ratios": {4}},
        sparse=Sparse(topk={4, 8}, block=SparseBlocks.block, holes=True, per_kv_head=True),
    )

    def set_of(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, topk]: the blocks of a query head. ``sets`` [T, Hk, topk]: the selection of each KV head."""
        return sets[:, head // plan.layer.q_per_kv]

    def read_by(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, n]: indices that are loaded for a query head."""
        return self.prepared(self.set_of(head, sets, plan), plan)

    @override
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        outs = []
        for head, rows in enumerate(q.float().unbind(1)):
            selected = self.read_by(head, plan.selected, plan)
            slot, there = self.slots(selected, plan), self.is_key(selected, plan)
            pools = (each.flatten(0, 1)[:, head // plan.layer.q_per_kv] for each in kv)
            k, v = (each[slot].float().masked_fill(~there[..., None], 0.0) for each in pools)
            logits = (rows[:, None] @ k.mT * plan.layer.scaling).masked_fill(~there[:, None], -torch.inf)
            outs.append((torch.softmax(logits, -1).nan_to_num(nan=0.0) @ v)[:, 0])
        return torch.stack(outs, 1).to(q.dtype)


class SparsePagesOfHeads(SparseOfHeads):
    """The parent for pages that each KV head selects: a list of pages takes the place of a page table."""

    capabilities = SparseOfHeads.capabilities.with_changes(
        bounds={"max_draft_branches": 1},
        sparse=Sparse(topk={4, 8}, block=16, index_space="pages", per_kv_head=True, without_own_block=True),
    )

    def keys_in(self, pages: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, topk]: keys of each of ``pages`` [T, topk] to which its row attends, from its first slot on."""
        last = (self.keys_seen(pages, plan) - 1).clamp(min=0).long()
        own = plan.page_table[self.request_of_row(pages, plan)].gather(1, self.page_of(last, plan)[:, None])
        return torch.where(pages == own, (last % self.block + 1)[:, None], self.block)

    def page_of(self, keys: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T] int64: column of the page table for ``keys`` [T] int64."""
        return (keys // self.block).clamp(max=plan.page_table.shape[1] - 1)

    @override
    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        inside = torch.arange(self.block, device=selected.device)
        there = self.is_block(selected)[..., None] & (inside < self.keys_in(selected, plan)[..., None])
        return torch.where(there, selected[..., None].long() * self.block + inside, -1).flatten(1)

    @override
    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected.clamp(min=0).long()
