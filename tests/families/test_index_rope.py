"""Index queries and keys that a backend rotates: the rotation, its inverse, and what may be declared of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseRotatesBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Indexer
from attn_testkit.contract.index_rope import rotated_index
from attn_testkit.steps.index_data import make_index_data
from attn_testkit.steps.index_rope import before_rotation, turns_of
from attn_testkit.steps.schedule import make_schedule

CASE = "decode-mqa4-d32-bf16-p16-k40.21-shuffled-gauss-sel16-idx4{}-b2prod"


@pytest.mark.parametrize(("style", "first", "second"), [("neox", 5, 37), ("interleaved", 10, 11)])
def test_a_pair_turns_like_a_complex_number(style: str, first: int, second: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(7).standard_normal((3, 2, 128))).float()
    angles = torch.linspace(0.1, 3.0, 32) * torch.arange(1, 4)[:, None]
    found = rotated_index(rows, torch.cat([angles.cos(), angles.sin()], -1), style)
    want = torch.complex(rows[..., first], rows[..., second]) * torch.exp(1j * angles[:, 5, None])
    assert torch.allclose(torch.complex(found[..., first], found[..., second]), want, atol=1e-6)
    assert torch.equal(found[..., 64:], rows[..., 64:])


@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_the_turns_of_cases_are_exact_and_differ_from_position_to_position(style: str) -> None:
    rows, turns = torch.arange(5 * 128).view(5, 128).float(), turns_of(torch.arange(5))
    before = before_rotation(rows, turns, style)
    assert torch.equal(rotated_index(before, turns, style), rows)
    assert torch.equal(before[0], rows[0])
    assert all(not torch.equal(before[place], rows[place]) for place in (1, 2, 3))


def test_queries_that_a_backend_quantizes_have_a_scale_that_is_a_power_of_two() -> None:
    schedule = make_schedule(parse_case(CASE.format("neox")))
    index = make_index_data(schedule, schedule.steps[0])
    assert (index.q.float().abs().amax(-1) == 448).all()
    assert not index.by_slot[..., -2].any()
    other = make_schedule(parse_case(CASE.format("")))
    assert float(make_index_data(other, other.steps[0]).q.float().abs().amax()) == 3


@pytest.mark.parametrize("more", [{"fused": True}, {"drafts": {"each"}}, {"replicated": True}])
def test_an_indexer_that_rotates_is_no_part_of_forward_and_of_no_draft_or_rank(more: dict) -> None:
    with pytest.raises(ValueError, match="rotates excludes drafts, fused and replicated"):
        Indexer(heads={4}, rotates="neox", **more)


@pytest.mark.parametrize("case", [CASE.format("interleaved"), CASE.format("interleavedgauss")])
def test_a_right_backend_rotates_and_quantizes_in_eager_and_in_graphs(case: str) -> None:
    found = [each for each in check_backend(TorchNativeSparseRotatesBackend, device="cpu", cases=[case]) if each.case]
    assert [each.status for each in found] == ["passed", "passed"]
