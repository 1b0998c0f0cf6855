"""Healthy backends that are built differently from their parent, for faults to override and controls to use."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, DraftExtendInput, ForwardBatch, VerifyInput

from .orders import in_other_order
from .parent import Metadata, PlannedBackend


class KeptPlansBackend(PlannedBackend):
    """Eager plans are kept, and reused for a batch with the same key, which contains everything on which a plan
    depends."""

    capabilities = PlannedBackend.capabilities.with_changes(server={"eager_without_waits": False})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[tuple[object, ...], Metadata] = {}

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.in_graph = self.capturing = False
        key = self.plan_key(batch)
        if key not in self.kept:
            self.kept[key] = self.plan(batch)
        self.metadata = self.kept[key]

    def plan_key(self, batch: ForwardBatch) -> tuple[object, ...]:
        """Bytes of the batch. An eager plan waits for the device to get them, as ``eager_without_waits=False`` says."""
        bs, spec = batch.batch_size, batch.spec_info
        parts = [batch.seq_lens[:bs], batch.out_cache_loc, self.plan_pages(batch)]
        if isinstance(spec, DraftExtendInput):
            parts.append(spec.num_accept_tokens[:bs])
        elif isinstance(spec, VerifyInput) and spec.custom_mask is not None:
            parts.append(spec.custom_mask.view(torch.uint8))
        return (batch.forward_mode, bs, *(part.cpu().numpy().tobytes() for part in parts))


class CascadeBackend(PlannedBackend):
    """Whole pages with which all prefixes begin are attended to once for all requests, and merged with the other keys.

    The first split is the shared prefix, read through request 0's pages; the others have each request's own keys.
    """

    common: torch.Tensor
    """[] int64: shared keys."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        self.common = self.common_pages(meta) * self.context.page_size
        return super().attend(q, layer, meta)

    def common_pages(self, meta: Metadata) -> torch.Tensor:
        """[] int64."""
        table = meta.page_table
        whole = (meta.kv_lens - meta.cu_seqlens_q.diff()).amin().clamp(min=0) // self.context.page_size
        same = (table == table[:1]).all(0) & (len(table) > 1)
        return torch.minimum(same.long().cumprod(0).sum(), whole.long())

    @override
    def key_slots(self, meta: Metadata) -> torch.Tensor:
        slots = super().key_slots(meta)
        return torch.where(self.index[: slots.shape[1]] < self.common, slots[:1], slots)

    @override
    def in_split(self, meta: Metadata) -> torch.Tensor:
        key, own = self.index[: self.pages * self.context.page_size], meta.kv_lens.long() - self.common
        chunk = ((own + self.max_splits - 2) // (self.max_splits - 1)).clamp(min=1)[:, None]
        split = torch.where(key < self.common, 0, 1 + (key - self.common) // chunk)
        return split[:, None] == self.index[: self.max_splits, None]


class RegisterRowsBackend(PlannedBackend):
    """New keys and values are attended to from ``k`` and ``v``, and stored by the same kernel.

    With ``save_kv_cache`` False ``k`` and ``v`` are not read.
    """

    new: tuple[torch.Tensor, torch.Tensor] | None = None

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        assert self.metadata is not None
        self.new = self.registers(k, v, save_kv_cache)
        out = self.attend(q, layer, self.metadata)
        self.new = None
        if save_kv_cache:
            self.write_kv(layer, k, v, self.metadata)
        return out

    def registers(self, k: torch.Tensor, v: torch.Tensor, store: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows that are attended to from registers; None: everything is in the pool."""
        return (k, v) if store else None

    @override
    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().gather(layer, slots)
        if self.new is None:
            return keys, values
        meta = self.metadata
        assert meta is not None
        prefix = (meta.kv_lens - meta.cu_seqlens_q.diff()).long()[:, None]
        offset = self.index[: slots.shape[1]] - prefix
        row = (meta.cu_seqlens_q[:-1, None] + offset).clamp(0, len(self.new[0]) - 1)
        mine = ((offset >= 0) & (offset < meta.cu_seqlens_q.diff()[:, None]))[:, :, None, None]
        k, v = (new.reshape(len(new), layer.tp_k_head_num, -1)[row].float() for new in self.new)
        # Gathered rows are multiplied by the scales of an FP8 pool further on.
        k, v = k / layer.k_scale, v / layer.v_scale
        return torch.where(mine, k, keys), torch.where(mine, v, values)


class TiledBackend(PlannedBackend):
    """A split's keys are walked in tiles, with a running maximum that is raised only by more than ``slack``.

    A slightly smaller reference loses no precision in float32, and most tiles then need no rescaling (FlashAttention
    4).
    """

    keys_in_tile = 32
    slack = 5.5

    @override
    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        masked = logits[:, None].masked_fill(~seen[:, :, :, None, None], -torch.inf)
        top = torch.full_like(masked[..., 0], -torch.inf)
        total, out = torch.zeros_like(top), top.new_zeros(*top.shape, values.shape[-1])
        tiles, parts = torch.split(masked, self.keys_in_tile, -1), torch.split(values, self.keys_in_tile, 1)
        for tile, value in zip(tiles, parts, strict=True):
            raised = self.raise_maximum(top, tile)
            reference = raised.masked_fill(raised == -torch.inf, 0.0)
            p, shrink = torch.exp(tile - reference[..., None]), torch.exp(top - reference)
            total = total * shrink + p.sum(-1)
            out = self.added(out * shrink[..., None], self.product(p, value))
            top = raised
        acc.copy_((out / total.clamp(min=1e-30)[..., None]).flatten(3, 4))
        lse.copy_((top + total.log()).flatten(3, 4))

    def raise_maximum(self, top: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
        """[B, S, W, Hk, G]: the reference from this tile on."""
        largest = tile.amax(-1)
        return torch.where(largest > top + self.slack, largest, top)

    def added(self, out: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Accumulator after a tile."""
        return out + part

    def product(self, p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Product P V of a tile."""
        return torch.einsum("bnwhgs,bshd->bnwhgd", p, values)


class FixedStrideBackend(PlannedBackend):
    """Captured kernels find a request's rows by a fixed stride if all requests have equally many; else rows are
    packed."""

    packed = False

    @override
    def views(self, batch: ForwardBatch) -> Metadata:
        self.packed = batch.forward_mode.is_ragged()
        return super().views(batch)

    def stride(self, meta: Metadata) -> int:
        """Rows from one request's first row to the next one's, in a graph; 0: rows are packed."""
        return 0 if self.packed else meta.max_q_len

    @override
    def row_of(self, meta: Metadata, tokens: int) -> torch.Tensor:
        if not self.in_graph or not self.stride(meta):
            return super().row_of(meta, tokens)
        first = self.index[: len(meta.kv_lens), None] * self.stride(meta)
        return (first + self.index[: meta.max_q_len]).clamp(0, tokens - 1)

    @override
    def scatter(self, out: torch.Tensor, meta: Metadata, tokens: int) -> torch.Tensor:
        if not self.in_graph or not self.stride(meta):
            return super().scatter(out, meta, tokens)
        row, stride = self.index[:tokens], self.stride(meta)
        place = (row // stride).clamp(max=len(out) - 1) * meta.max_q_len + (row % stride).clamp(max=meta.max_q_len - 1)
        return out.flatten(0, 1)[place]


class WorkListBackend(PlannedBackend):
    """Each pair of a row and a key is a numbered work item; numbers past the total are skipped."""

    def total(self, meta: Metadata, position: torch.Tensor) -> torch.Tensor:
        """[] int64: number of items, from the rows' positions [B, W] int64."""
        return (position + 1).clamp(min=0).sum()

    @override
    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        seen = super().visible(meta, layer, position)
        return seen & (seen.flatten().cumsum(0).view_as(seen) <= self.total(meta, position))


class BatchInvariantBackend(PlannedBackend):
    """Splits depend only on the request's own length, so its bits do not depend on other requests.

    Requests are computed one by one: a batched matrix product chooses its order of summation by the size of the batch.
    If a fault plans other splits for a request, its bits change on every processor: the sums are those of its own
    splits, in another order (``in_other_order``).
    """

    capabilities = PlannedBackend.capabilities.with_changes(promises={"batch_invariant": True})

    @override
    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return self.own_splits(lens)

    def own_splits(self, lens: torch.Tensor) -> torch.Tensor:
        """[B] int32: keys in one split of each request for the right bits. ``lens`` [B] int32."""
        return super().plan_splits(lens)

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        own, ends = self.own_splits(meta.kv_lens), meta.cu_seqlens_q[1:].long()
        out = super().attend(q, layer, replace(meta, chunk=own))
        other = (meta.chunk != own) & (torch.minimum(meta.chunk, own) < meta.kv_lens)
        request = torch.searchsorted(ends, self.index[: len(q)], right=True).clamp(max=len(ends) - 1)
        return in_other_order(out, other[request][:, None, None])

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        one_by_one = zip(_singly(rows), _singly(keys), strict=True)
        return torch.cat([super(BatchInvariantBackend, self).logits(q, k, layer) for q, k in one_by_one])

    @override
    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        for one in zip(*(_singly(x) for x in (logits, seen, values, acc, lse)), strict=True):
            super().partials(*one)


class ModeInvariantBackend(BatchInvariantBackend):
    """Rows of a request are computed one by one too, so their number, which differs between modes, changes no bit."""

    capabilities = BatchInvariantBackend.capabilities.with_changes(
        promises={"mode_invariant": True},
        heads={"families": {"gqa"}, "gqa_ratios": {2}, "head_dims": {64}},
        precision={"dtypes": {"fp32"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16}},
        bounds={"max_extend_tokens": 32, "max_context_len": 2048},
    )

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return torch.cat(
            [super(ModeInvariantBackend, self).logits(row, keys, layer) for row in torch.split(rows, 1, 1)], 1
        )

    @override
    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        by_row = zip(
            *(torch.split(rows, 1, dim) for rows, dim in ((logits, 1), (seen, 2), (acc, 2), (lse, 2))), strict=True
        )
        for of_logits, of_seen, of_acc, of_lse in by_row:
            super().partials(of_logits, of_seen, values, of_acc, of_lse)


class SplitsOfFixedTokensBackend(ModeInvariantBackend):
    """Splits hold a fixed number of tokens in each mode and bucket, so graphs give the bits of eager mode.

    It declares only mode invariance, so only ``mode-invariant`` compares its replays with eager runs bit for bit.
    """

    capabilities = ModeInvariantBackend.capabilities.with_changes(
        promises={"batch_invariant": False},
        eager={"decode", "extend", "target-verify"},
        graph={"decode", "target-verify"},
        bounds={"max_topk": 1},
        options={"logit_cap": False, "sinks": False},
    )
    max_splits = 4
    split_tokens = 16
    """Tokens of each split; the last one has the rest."""

    @override
    def own_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return torch.full_like(lens, self.split_tokens)

    @override
    def in_split(self, meta: Metadata) -> torch.Tensor:
        chunk = meta.chunk.long()[:, None].clamp(min=1)
        split = (self.index[: self.pages * self.context.page_size] // chunk).clamp(max=self.max_splits - 1)
        return split[:, None] == self.index[: self.max_splits, None]


def _singly(rows: torch.Tensor) -> list[torch.Tensor]:
    """Views of one row each, which keep their first dimension."""
    return [rows[i : i + 1] for i in range(len(rows))]


class CountedRunsBackend(PlannedBackend):
    """Keeps a number on the device, such as a queue's head or a semaphore, which the plan of a replay clears."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.runs = torch.zeros(1, dtype=torch.int32, device=context.device)

    @override
    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        self.runs.zero_()

    @override
    def init_forward_metadata_before_capture(self, batch: ForwardBatch) -> None:
        self.runs.zero_()

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self.runs.zero_()
