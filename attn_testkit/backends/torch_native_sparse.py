"""Sparse attention in plain torch: each row gathers the keys that it selects. Slow, short, and right in every mode."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import (
    INDEX_PAGE,
    LATENT_FORMATS,
    ROPE_IN_VALUE,
    AttentionLayer,
    Bounds,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    Indexer,
    KernelBackend,
    KernelPlan,
    KVPools,
    LayerOptions,
    LogSumExp,
    Needs,
    Precision,
    Promises,
    ServerConventions,
    Sparse,
)
from ..contract.index_pool import index_scales
from ..contract.index_rope import rotated_index

_GATHERED = 1 << 25
"""Number of elements of keys that are gathered at once: 128 MiB in float32."""


class TorchNativeSparseBackend(KernelBackend):
    """``selected`` holds positions, which the request table maps to slots."""

    capabilities = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        heads=HeadShapes(
            families={"mha", "gqa", "mqa", "mla"},
            gqa_ratios=set(range(1, 129)),
            head_dims={32, 64, 128, 512},
            mla_rope_dims={32, 64},
        ),
        precision=Precision(dtypes={"fp16", "bf16", "fp32"}),
        kv_pool=KVPools(kv_dtypes={"same", "fp8_e4m3"}, page_sizes={1, 16, 64}),
        options=LayerOptions(sinks=True, non_causal={ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY}),
        sparse=Sparse(
            topk={1, 16, 64, 2048},
            holes=True,
            empty_rows=True,
            fewer_rows=True,
            any_padding=True,
            indexer=Indexer(heads={4, 64}, reuses_selections=True, drafts={"each", "first"}),
        ),
        server=ServerConventions(
            takes_more_rows=True,
            takes_requests_without_rows=True,
            takes_column_views=True,
            context_len={"all", "prefix"},
        ),
        lse=LogSumExp("e", whole=frozenset(ForwardMode)),
        bounds=Bounds(max_q_rows=16, max_topk=1, max_draft_branches=4),
        needs=Needs(cpu_seq_lens=False),
        promises=Promises(deterministic=True),
    )

    def request_of_row(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T] int64: request of each of ``rows`` [T, ...]; the last one for padded rows."""
        row = torch.arange(len(rows), device=rows.device)
        found: torch.Tensor = torch.searchsorted(plan.cu_seqlens_q, row, right=True) - 1
        return found.clamp(max=len(plan.kv_lens) - 1)

    def keys_seen(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T] int64: number of keys that each of ``rows`` [T, ...] may see."""
        request, row = self.request_of_row(rows, plan), torch.arange(len(rows), device=rows.device)
        if not plan.layer.causal:
            return plan.kv_lens[request]
        return plan.prefix_lens[request] + row - plan.cu_seqlens_q[request] + 1

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, topk] int64: the slot of each selected key; any slot for -1."""
        request = self.request_of_row(selected, plan)
        return plan.slot_table[request[:, None], selected.clamp(min=0).long()].long()

    def indices(self, keys: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[T, n]: ``keys`` [T, n] int64, positions, as ``selected`` names them. ``table`` [T, keys]: their slots."""
        return keys

    def own_columns(self, plan: KernelPlan) -> torch.Tensor:
        """[bs, n] int32: the request table without columns that no request fills, as none has more keys than the pool.

        In a context of a million tokens a float32 for each row and column would take gigabytes.
        """
        return plan.slot_table[:, : self.context.kv_pool.num_slots]

    def scored(
        self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score every key of the pool, or of the request table if that has fewer keys, and look up the scores of each
        request: [T, keys] float32. Also return the number of keys that each row sees, [T]; scores after these may be
        NaN.
        """
        request, table, pool = self.request_of_row(q_index, plan), self.own_columns(plan), self.context.kv_pool
        if table.numel() < pool.num_slots:
            listed = self.scores_of_slots(q_index, weights, plan.layer, table.flatten().long())
            scores = listed.view(len(request), *table.shape)[torch.arange(len(request), device=request.device), request]
        else:
            scores = self.scores_of_slots(q_index, weights, plan.layer).gather(1, table[request].long())
        return scores, self.keys_seen(q_index, plan)

    def scores_of_slots(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, n] float32: the score of the key in each of ``slots`` [n] int64, or of each key of the pool."""
        pool = self.context.index_pool
        assert pool is not None
        keys, scales = pool.get_keys(layer.layer_id), pool.get_scales(layer.layer_id)
        if slots is None:
            keys, scales = keys.flatten(0, 1).float(), scales.flatten()
        else:
            at = slots // INDEX_PAGE, slots % INDEX_PAGE
            # Indexing is not implemented for FP8 on every device.
            keys, scales = keys.view(torch.uint8)[at].view(keys.dtype).float(), scales[at]
        of_slot = torch.zeros(len(q_index), len(keys), device=keys.device)
        for head in range(layer.index_heads):
            of_slot += (q_index[:, head].float() @ keys.T).relu_() * weights[:, head, None]
        return of_slot * scales

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Select the keys with the highest scores among those that a row sees."""
        scores, sees = self.scored(q_index, weights, plan)
        topk, columns = plan.layer.topk, scores.shape[1]
        key = torch.arange(columns, device=scores.device)
        best = torch.where(key < sees[:, None], scores, -torch.inf).topk(min(topk, columns), 1).indices
        table = self.own_columns(plan)[self.request_of_row(q_index, plan)].long()
        found = torch.where(best < sees[:, None], self.indices(best, table), -1).to(torch.int32)
        return torch.nn.functional.pad(found, (0, topk - found.shape[1]), value=-1)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Gather the selected keys of each row, and attend to them."""
        return self.run_return_lse(q, kv, plan)[0]

    def run_return_lse(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp [T, Hq]: -inf, or the sink, for a row that selects no key."""
        assert plan.selected is not None
        # Padded rows after the last selection select no key.
        selected = torch.nn.functional.pad(plan.selected, (0, 0, 0, len(q) - len(plan.selected)), value=-1)
        return self.attend_all(q, kv, plan, self.slots(selected, plan), self.is_key(selected, plan))

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, topk] bool: True for the selected keys of ``plan.part``, and False for -1."""
        return selected >= 0

    def read(
        self, kv: tuple[torch.Tensor, torch.Tensor], slot: torch.Tensor, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [T, n, Hk, D] and values [T, n, Hk, Dv] in ``slot`` [T, n], float32."""
        k, v = (each.flatten(0, 1)[slot].float() for each in kv)
        return k * layer.k_scale, v * layer.v_scale

    def attend_all(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        plan: KernelPlan,
        slot: torch.Tensor,
        is_key: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend in chunks of rows: 1,000 rows of 2,048 keys with 576 values would need 4.4 GiB several times."""
        rows = max(1, _GATHERED // (slot.shape[1] * kv[0].shape[-2] * kv[0].shape[-1]))
        starts = range(0, max(1, len(q)), rows)
        chunks = [
            self.attend(q[at : at + rows], kv, plan, slot[at : at + rows], is_key[at : at + rows]) for at in starts
        ]
        outs, lses = zip(*chunks, strict=True)
        return torch.cat(outs), torch.cat(lses)

    def attend(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        plan: KernelPlan,
        slot: torch.Tensor,
        is_key: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the keys in ``slot`` [T, n], or [T, n, Hk] if KV heads have different keys, for which ``is_key`` is
        true. Values read for -1 may be NaN, so they are masked first."""
        layer, there = plan.layer, (is_key if is_key.dim() > 2 else is_key[..., None])[..., None]
        k, v = (each.masked_fill(~there, 0.0) for each in self.read(kv, slot, layer))
        group = layer.q_per_kv
        rows = q.float().view(len(q), -1, group, q.shape[-1])
        logits = torch.einsum("thgd,tnhd->thgn", rows, k) * layer.scaling
        if layer.logit_cap:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        logits = logits.masked_fill(~there.permute(0, 2, 3, 1), -torch.inf)
        top = logits.amax(-1, keepdim=True)
        sinks = None if layer.sinks is None else layer.sinks.float().view(-1, group, 1)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        top = top.clamp(min=torch.finfo(torch.float32).min)
        weights = torch.exp(logits - top)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks - top)
        lse = (top + torch.log(total)).flatten(1)
        # A row without a key gives zeros.
        weights = weights / total.clamp(min=torch.finfo(torch.float32).tiny)
        return torch.einsum("thgn,tnhd->thgd", weights, v).flatten(1, 2).to(q.dtype), lse


class TorchNativeSparseSlotsBackend(TorchNativeSparseBackend):
    """``selected`` holds slots of the KV pool."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        sparse={"index_space": "slots", "indexer": Indexer(heads={4}, scale="power_of_two")}
    )

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Return the selection, which lists slots already."""
        return selected.clamp(min=0).long()

    def indices(self, keys: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Slots of the keys."""
        return table.gather(1, keys)


class TorchNativeSparseRotatesBackend(TorchNativeSparseBackend):
    """The backend rotates index queries and keys, and quantizes the queries."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        eager=frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE},
        graph=frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE},
        sparse={"indexer": Indexer(heads={4}, rotates="interleaved")},
        lse=None,
    )

    def rotated(self, rows: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Rows [T, ..., 128] of index queries or keys after their rotation, in the model's dtype."""
        assert self.context.index_rope is not None
        return rotated_index(rows, self.context.index_rope[batch.positions], "interleaved").to(rows.dtype)

    @override
    def store_index(self, k_index: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Rotate keys before they are quantized and stored."""
        super().store_index(self.rotated(k_index, batch), layer, batch)

    @override
    def select(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Rotate queries, and quantize them with a scale per row and head, which the weights then include."""
        rows = self.rotated(q_index, batch).float()
        scales = index_scales(rows.flatten(0, 1), "amax").view(rows.shape[:2])
        quantized = (rows / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return super().select(quantized, weights * scales, layer, batch)


class TorchNativeSparsePackedBackend(TorchNativeSparseBackend):
    """The pool holds packed rows of FP8 or FP4 numbers, scales and an unscaled rope part: 656 or 352 bytes for DeepSeek
    V3.2."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        heads={"families": {"mla"}, "head_dims": {128, 512}, "mla_rope_dims": {64}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": LATENT_FORMATS - ROPE_IN_VALUE},
    )

    def read(
        self, kv: tuple[torch.Tensor, torch.Tensor], slot: torch.Tensor, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers times their scales, followed by the rope part."""
        rows = self.context.kv_pool.rows_of(layer)
        assert rows is not None
        keys = rows.unpack(kv[0].flatten(0, 1)[slot])
        return keys, keys[..., : layer.kv_lora_rank]


class TorchNativeSparsePackedPagesBackend(TorchNativeSparseBackend):
    """The pool holds packed rows of DeepSeek V4 and V4.1, of 584 and 528 bytes: a page has the scales of its rows after
    all their numbers. The value of a token is its whole row."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        heads={"families": {"mla"}, "head_dims": {128, 512}, "mla_rope_dims": {0}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": ROPE_IN_VALUE},
    )

    def read(
        self, kv: tuple[torch.Tensor, torch.Tensor], slot: torch.Tensor, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers times their scales, which are both key and value."""
        pool, at = self.context.kv_pool, (slot // self.context.page_size, slot % self.context.page_size)
        rows = pool.rows_of(layer)
        assert rows is not None
        keys = rows.unpack(torch.cat((kv[0][at], pool.get_scale_pages(layer.layer_id)[0][at]), -1))
        return keys, keys


class TorchNativeSparseBlocksBackend(TorchNativeSparseBackend):
    """``selected`` holds blocks of 16 keys. The last block of a row ends with the row's own key."""

    block = 16
    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        heads={"families": {"mha", "gqa", "mqa"}, "mla_rope_dims": set()},
        sparse=Sparse(topk={1, 4, 16}, block=block, holes=True, fewer_rows=True, any_padding=True),
        lse=LogSumExp("e", whole=frozenset(ForwardMode)),
    )

    def run_return_lse(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the keys of the selected blocks that a row may see."""
        assert plan.selected is not None
        missing = len(q) - len(plan.selected)
        sets = torch.nn.functional.pad(plan.selected, (0, 0) * (plan.selected.dim() - 1) + (0, missing), value=-1)
        # [T, n], or [T, n, Hk] of KV heads that select for themselves: they are the last axis, as in the pool.
        slots, is_key = (each.flatten(-2).movedim(-1, 1) for each in self.keys_of_blocks(sets, plan))
        return self.attend_all(q, kv, plan, slots, is_key)

    def keys_of_blocks(self, sets: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot of each key of the blocks ``sets`` [T, topk] or [T, Hk, topk], and if its row attends to it: both have
        the shape of ``sets``, and a last axis for the keys of a block."""
        request, seen = (
            each.view(-1, *[1] * sets.dim()) for each in (self.request_of_row(sets, plan), self.keys_seen(sets, plan))
        )
        keys = sets[..., None] * self.block + torch.arange(self.block, device=sets.device)
        is_key = (sets[..., None] >= 0) & (keys < seen)
        # A padded row may hold any block, also one past the table.
        places = torch.where(is_key, keys, 0).clamp(max=plan.slot_table.shape[1] - 1).long()
        return plan.slot_table[request, places].long(), is_key


class TorchNativeSparseHeadsBackend(TorchNativeSparseBlocksBackend):
    """Each KV head selects blocks of 16 keys for itself (NSA, MoBA, MiniMax-M3)."""

    capabilities = TorchNativeSparseBlocksBackend.capabilities.with_changes(
        sparse={"per_kv_head": True, "without_own_block": True}
    )

    def read(
        self, kv: tuple[torch.Tensor, torch.Tensor], slot: torch.Tensor, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in ``slot`` [T, n, Hk], each KV head from its own slots."""
        head = torch.arange(layer.tp_k_head_num, device=slot.device)
        k, v = (each.flatten(0, 1)[slot, head].float() for each in kv)
        return k * layer.k_scale, v * layer.v_scale


class TorchNativeSparsePagesBackend(TorchNativeSparseHeadsBackend):
    """Each KV head selects pages of the pool, so its list replaces the page table (FlashInfer's decode of trtllm-gen
    with ``enable_block_sparse_attention``)."""

    capabilities = TorchNativeSparseHeadsBackend.capabilities.with_changes(
        kv_pool={"page_sizes": {TorchNativeSparseHeadsBackend.block}},
        sparse={"index_space": "pages", "holes": False},
        bounds={"max_draft_branches": 1},
    )

    def keys_of_blocks(self, sets: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the pages ``sets`` [T, Hk, topk]. Only the page of the last key that a row sees is not full."""
        request, last = self.request_of_row(sets, plan), (self.keys_seen(sets, plan) - 1).clamp(min=0).long()
        own = plan.page_table[request, (last // self.block).clamp(max=plan.page_table.shape[1] - 1)]
        inside = torch.arange(self.block, device=sets.device)
        full = sets != own[:, None, None]
        is_key = (sets >= 0)[..., None] & (full[..., None] | (inside <= (last % self.block)[:, None, None, None]))
        # A padded row may hold any page, also one that no request owns.
        return (sets.clamp(min=0).long()[..., None] * self.block + inside), is_key
