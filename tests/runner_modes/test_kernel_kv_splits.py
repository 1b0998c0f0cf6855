"""A kernel that is given a part's own table and lengths needs nothing else to be right in every kind of part."""

from __future__ import annotations

import math

import pytest
import torch
from in_process import check_backend

from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode, KernelBackend, KernelPlan, LogSumExp
from attn_testkit.examples import MinimalBackend

MODES = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
PAGE = 4


class ByPart(MinimalBackend):
    """Reads the keys of a part by their slots, or by their pages; base 2, heads before rows."""

    capabilities = MinimalBackend.capabilities.with_changes(
        options={"sinks": True},
        kv_pool={"page_sizes": {PAGE}},
        precision={"dtypes": {"bf16"}},
        heads={"head_dims": {64}, "gqa_ratios": {2}},
        bounds={"max_context_len": 4096},
        eager=MODES,
        graph=MODES,
        lse=LogSumExp("2", layout="[H, T]", whole=MODES, prefix=MODES, pages=MODES, tokens=MODES),
    )

    def run_return_lse(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        request, visible = self.visible(q, plan)
        columns = plan.part_slots.shape[1]
        there = torch.arange(columns, device=q.device) < plan.part_lens[:, None]
        seen = visible.gather(1, plan.part_keys[request]) & there[request]
        if plan.part.interleave == PAGE:
            k, v = (cache[plan.part_pages.long()].flatten(1, 2)[:, :columns] for cache in kv)
        else:
            k, v = (cache.flatten(0, 1)[plan.part_slots.long()] for cache in kv)
        rows = q.reshape(len(q), plan.layer.tp_k_head_num, plan.layer.q_per_kv, -1).float()
        logits = torch.einsum("thgd,tshd->thgs", rows, k[request].float()) * plan.layer.scaling
        logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
        if plan.layer.sinks is not None:
            sinks = plan.layer.sinks.view(1, rows.shape[1], -1, 1).expand(len(q), -1, -1, 1)
            logits = torch.cat([logits, sinks], -1)
        p = logits.softmax(-1)[..., :columns].nan_to_num()
        out = torch.einsum("thgs,tshd->thgd", p, v[request].float().masked_fill(~seen[:, :, None, None], 0.0))
        lse = torch.logsumexp(logits, -1).flatten(1) / math.log(2)
        return out.flatten(1, 2).to(q.dtype), lse.t()

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        raise AssertionError("only cases with parts are asked for")


@pytest.mark.parametrize("mode", sorted(MODES))
def test_tables_of_parts_are_right_eager_and_in_graphs(mode: ForwardMode) -> None:
    # Tables know nothing of heads: 32 KV heads take ByPart ten times as long as all other cases together.
    core = generate(ByPart.capabilities, mode, "core")
    found = [case.id for case in core if case.kv_splits and max(case.prefixes) < 100 and case.heads.kv_heads < 32]
    # One case of each kind, for time: others of a kind have other lengths and options of layers.
    by_kind = {case.rpartition("lse")[2].partition("-")[0]: case for case in found}
    assert by_kind.keys() >= {"whole", "prefix", "pages2", "tokens3"}
    assert by_kind.keys() <= {"whole", "prefix", "pages2", "pages3", "tokens2", "tokens3"}
    assert check_backend(ByPart, cases=list(by_kind.values()), device="cpu")


class ByRank(ByPart):
    """Healthy: one of several ranks with pools of their own; whole pages are read by the page table of the rank."""

    capabilities = ByPart.capabilities.with_changes(lse=LogSumExp("2", layout="[H, T]", ranks=MODES))


@pytest.mark.parametrize(
    "case",
    [
        "decode-gqa2x2-d64-bf16-p4-k7.0.4.8.1.12-reversed-gauss-ranks2by4-b7prod",
        "target-verify-gqa2x2-d64-bf16-p4-k2.0.1.12-chain2-shuffled-gauss-sink-ranks3by1-b4prod",
    ],
)
def test_tables_of_ranks_are_right_eager_and_in_graphs(case: str) -> None:
    assert check_backend(ByRank, cases=[case], device="cpu")


class Forgotten(MinimalBackend):
    capabilities = ByPart.capabilities


def test_a_kernel_without_the_method_says_which() -> None:
    case = next(case.id for case in generate(Forgotten.capabilities, ForwardMode.DECODE, "core") if case.kv_splits)
    results = check_backend(Forgotten, cases=[case], device="cpu", executions=["eager"], modes=["decode"])
    headlines = [finding.headline for row in results.rows for finding in row.findings]
    assert any("Forgotten declares lse but does not define run_return_lse" in headline for headline in headlines)
    assert Forgotten.run_return_lse is KernelBackend.run_return_lse
