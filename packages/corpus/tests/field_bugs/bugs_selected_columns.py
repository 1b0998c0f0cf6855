"""Indexers and selections that name, read or bound the wrong column. See ``nineteenth_set.md``."""

from __future__ import annotations

import torch
from parents_mode import KnowsMode

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.contract import AttentionLayer, ForwardMode, KernelPlan
from attn_testkit_corpus.faults.catalogue import bug


class Moded(KnowsMode, TorchNativeSparseBackend):
    """The healthy parent, which also knows the mode of its step."""


@bug(
    19,
    "cudnn-frontend #445",
    "extend-gqa2x2-d128-fp32-p1-k1.2.5.9.14.2.30-n2a0.9.0x2.3.0.2-interleaved-mean-kvfp8e4m3-sel16-idx4reuse-b7prod-padded_tokens-overlap_scheduling",
    "selection-well-formed",
)
class LanesOfLastTile(TorchNativeSparseBackend):
    """cudnn-frontend #445: lanes that fill up the last tile are keys of score -inf, as FP16 has scores below -65504."""

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        right = super().run_select(q_index, weights, plan)
        scores, sees = self.scored(q_index, weights, plan)
        topk = plan.layer.topk
        scores = torch.nn.functional.pad(scores, (0, 128 + -scores.shape[1] % 128))
        lane, sees = torch.arange(scores.shape[1], device=scores.device), sees[:, None]
        filled = (lane >= sees) & (lane < -(-sees // 128) * 128)
        ranked = torch.where(scores.half() == -torch.inf, -2e38, scores)
        ranked = torch.where(filled, -1e38, torch.where(lane < sees, ranked, -torch.inf))
        best = ranked.topk(min(topk, len(lane)), 1).indices.to(torch.int32)
        best = torch.nn.functional.pad(best, (0, topk - best.shape[1]), value=-1)
        return torch.where(sees > topk, best, right)

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().slots(selected.clamp(max=plan.slot_table.shape[1] - 1), plan)


@bug(
    19,
    "vllm #56749",
    "extend-gqa2x2-d128-fp32-p1-k1.2.5.9.14.2.30-n2a0.9.0x2.3.0.2-interleaved-mean-kvfp8e4m3-sel16-idx4reuse-b7prod-padded_tokens-overlap_scheduling",
    "selection-well-formed",
)
class ColumnsOfPackedKeys(Moded):
    """vllm #56749: the top-k of a prefill names columns of the keys of all requests."""

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        found = super().run_select(q_index, weights, plan)
        if self.mode is not ForwardMode.EXTEND:
            return found
        starts = (plan.kv_lens.cumsum(0) - plan.kv_lens)[self.request_of_row(q_index, plan)]
        return torch.where(found >= 0, found + starts[:, None], -1).to(torch.int32)

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().slots(selected.clamp(max=plan.slot_table.shape[1] - 1), plan)


@bug(
    19,
    "aiter #4290",
    "target-verify-gqa8x2-d128-fp16-p64-k7x2-chain2-shared-one_hot-kvfp8e4m3-sel1-idx4gauss-b5prod-padded_tokens",
    "selection-well-formed",
)
class BoundFromTheEnd(Moded):
    """aiter #4290: row i of a request sees the keys up to ``context_len - i``."""

    def scored(
        self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, sees = super().scored(q_index, weights, plan)
        if not self.mode.is_target_verify():
            return scores, sees
        request = self.request_of_row(q_index, plan)
        row = torch.arange(len(q_index), device=q_index.device) - plan.cu_seqlens_q[request]
        held = plan.kv_lens[request]
        return scores, torch.minimum(held, held - row + 1).clamp(min=0)


@bug(19, "aiter #5614", "decode-gqa8x2-d128-fp16-p64-k7x2-interleaved-mean-sink-sel1-idx4ties-b2prod", "selects-best")
class TokensAsPages(Moded):
    """aiter #5614: the position of a token is the column of the page table, and the page's first token is scored."""

    def own_columns(self, plan: KernelPlan) -> torch.Tensor:
        table, page = super().own_columns(plan), plan.page_size
        if self.mode is not ForwardMode.DECODE or page == 1:
            return table
        pages = table[:, ::page] // page
        column = torch.arange(table.shape[1], device=table.device).clamp(max=pages.shape[1] - 1)
        return pages[:, column] * page


@bug(
    19, "ik_llama.cpp #2344", "decode-gqa2x2-d32-fp16-p16-k70.33.1-shuffled-gauss-sink-sel1holesempty-b3prod", "finite"
)
class LeadingRowsWithoutKeys(TorchNativeSparseBackend):
    """ik_llama.cpp #2344: rows without a key are NaN if they are the first ones of the batch, with sinks."""

    def run_return_lse(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().run_return_lse(q, kv, plan)
        if plan.layer.sinks is None:
            return out, lse
        assert plan.selected is not None
        there = torch.nn.functional.pad((plan.selected >= 0).any(1), (0, len(q) - len(plan.selected)))
        return out.masked_fill((there.cumsum(0) == 0)[:, None, None], torch.nan), lse


@bug(19, "DeepGEMM #311", "decode-gqa8x2-d128-fp16-p64-k7x2-interleaved-mean-sink-sel1-idx4ties-b2prod", "selects-best")
class InterleavedIndexKeys(TorchNativeSparseBackend):
    """DeepGEMM #311: rows of a page are read as key and scale, one after another."""

    def scores_of_slots(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        pool = self.context.index_pool
        assert pool is not None
        rows = pool.get_index_buffer(layer.layer_id).view(-1, 132)
        rows = rows if slots is None else rows[slots]
        keys = rows[:, :128].contiguous().view(torch.float8_e4m3fn).float()
        scales = rows[:, 128:].contiguous().view(torch.float32)[:, 0]
        of_slot = torch.zeros(len(q_index), len(keys), device=keys.device)
        for head in range(layer.index_heads):
            of_slot += (q_index[:, head].float() @ keys.T).relu_() * weights[:, head, None]
        return of_slot * scales


@bug(19, "pypto-lib #158", "decode-mha2-d128-bf16-p1-k7.8.9-reversed-peaked-sink-sel1holes-b4prod")
class FirstSelectedIsFirstKey(Moded):
    """pypto-lib #158: the first entry of a selection is taken to be key 0."""

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        if self.mode is ForwardMode.DECODE:
            selected = torch.cat([selected[:, :1].clamp(max=0), selected[:, 1:]], 1)
        return super().slots(selected, plan)
