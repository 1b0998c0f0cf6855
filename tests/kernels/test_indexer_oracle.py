"""A second opinion on scores: FLA's naive indexer selects the keys that the kit's float64 scores select."""

from __future__ import annotations

import importlib.util

import alone
import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.families.sparse.data import make_sparse_data
from attn_testkit.families.sparse.index_scores import best_keys, stored_index
from attn_testkit.steps.index_data import make_index_data
from attn_testkit.steps.schedule import make_schedule

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fla", "einops")),
    reason="fla-core is not installed: ci/servers.sh kernels",
)
PROMPTS = "extend-mqa4-d64-bf16-p16-k0x3-n90a90.40.7-shuffled-gauss-sel16-{}-b3prod"


@pytest.mark.parametrize("indexer", ["idx4", "idx4pow2", "idx64"])
def test_flas_indexer_selects_the_same_keys(indexer: str) -> None:
    naive = alone.load("fla.ops.dsa.naive", {}).naive_dsa_indexer
    schedule = make_schedule(parse_case(PROMPTS.format(indexer)))
    step = schedule.steps[0]
    data, index = make_sparse_data(schedule, step), make_index_data(schedule, step)
    want = best_keys(schedule, data, index)
    left_out, scale = 0, "power_of_two" if "pow2" in indexer else "amax"
    for layer in range(2):
        keys, scales = stored_index(index.by_slot[layer], scale)
        first = 0
        for request in step.requests:
            rows, slots = slice(first, first + request.new), request.slots
            found = naive(
                index.q[layer, rows][None].float(),
                (keys * scales[:, None])[slots][None],
                index.weights[layer, rows][None],
                topk=16,
                scale=1.0,
                activation="relu",
            )
            first += request.new
            assert torch.equal(found[0].sort(-1).values, want[layer, rows].sort(-1).values)
            left_out += max(0, request.new - 16)
    assert left_out
