"""A context of a million tokens: a backend that stores a score for each row and column is not run on a CPU."""

from __future__ import annotations

import torch
from attn_testkit.runner_modes.messages import RunCase

from attn_testkit.contract import Execution, KernelPlan
from attn_testkit.environment import resolve
from attn_testkit.results.names import NO_ROOM
from attn_testkit.running.case_runs.case_run import run_case
from attn_testkit_corpus.faults.indexer import IndexerParent

CASE = "extend-mqa4-d64-bf16-p16-k41-n520a520-shuffled-gauss-sel16-idx4-layers1from0-b1prod-wide_scores"


class StoresAllColumns(IndexerParent):
    """Right, and it takes 2.2 GB."""

    def scored(self, q: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        scores = super().scored(q, weights, plan)
        stored = scores.new_empty(len(q), plan.slot_table.shape[1])
        stored[:, : scores.shape[1]] = scores
        return stored


def test_a_backend_that_stores_all_columns_is_not_run_and_takes_no_memory_of_the_machine() -> None:
    record = run_case(StoresAllColumns, RunCase(CASE, Execution.EAGER), resolve("cpu"), StoresAllColumns.capabilities)
    assert record.not_here.startswith(f"{NO_ROOM}for scores of more than 2^31 bytes and what is computed from them: ")
    assert "memory" in record.not_here
    assert not record.findings
    torch.empty(6 << 30, dtype=torch.uint8)  # there is no limit any more
