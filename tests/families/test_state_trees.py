"""Drafts that branch, and pools beyond 2^31 elements, of backends that keep states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.cases.trees import Tree
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode, State
from attn_testkit.families.recurrent.data import make_state_data, state_places, state_pool_slots
from attn_testkit.families.recurrent.recurrence import recur
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import r_trees as faults
from attn_testkit_corpus.faults.controls_of_states import StatesInTrees
from attn_testkit_corpus.faults.r_big_pools import OffsetOfASlotIn32Bits
from attn_testkit_corpus.faults.states import StateParent

DECLARED = TorchNativeStateBackend.capabilities
TREE = "target-verify-{}-d64-bf16-p16-k5.1.3-t0.0.1.1.3-shuffled-{}-k64w4s32{}-layers1from0-b4prod"
BIG = "decode-gdn4x2-d64-bf16-p16-k9.37.1-shuffled-mild_decay-k64w4s32.bigpool-layers1from0-b4prod"


def alone(data, request: int, path: list[int]):
    """The rows of a path of one request, as a chain."""
    first = sum(data.news[:request])
    rows = [first + row for row in path]
    return replace(
        data, q=data.q[:, rows], k=data.k[:, rows], v=data.v[:, rows], news=(len(path),), kept=(len(path),),
        states=data.states[:, [request]], windows=data.windows[:, [request]], trees=(), lists=data.lists[[request]],
        ends=(replace(data.ends[request], request=0, rows=len(path)),),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["gdn4x2", "kda4x2"])
def test_a_node_is_what_a_chain_of_its_ancestors_is(kind: str) -> None:
    schedule = make_schedule(parse_case(TREE.format(kind, "mild_decay", "")))
    step = schedule.steps[0]
    data = make_state_data(schedule, step)
    found = recur(data)
    assert data.trees[0] == Tree((0, 0, 1, 1, 3))
    assert len(set(data.trees)) > 1
    assert data.path(0, 6) == [0, 1, 3, 5]
    for request, tree in enumerate(data.trees):
        assert tree.topk == 2
        for node in range(6):
            path = [row for row in range(6) if tree.visible[node, row]]
            chained = recur(alone(data, request, path))
            assert torch.allclose(found.out[:, 6 * request + node], chained.out[:, -1], rtol=1e-12, atol=1e-15)
            assert torch.allclose(found.out_limit[:, 6 * request + node], chained.out_limit[:, -1], rtol=1e-9)
            if node == data.kept[request] - 1:
                assert torch.allclose(found.states[:, request], chained.states[:, 0], rtol=1e-12, atol=1e-15)
                assert torch.equal(found.windows[:, request], chained.windows[:, 0])
    depths = [depth for tree in data.trees for depth in tree.depths]
    prefixes = np.repeat([request.prefix for request in step.requests], 6)
    assert data.positions.tolist() == (prefixes + depths).tolist()


def test_a_copy_is_of_an_ancestor_of_the_accepted_node() -> None:
    schedule = make_schedule(parse_case(TREE.format("gdn4x2", "mild_decay", ".snap16")))
    seen = set[int]()
    for step in schedule.steps:
        data = make_state_data(schedule, step)
        for request, rows in enumerate(data.snapshot_rows):
            path = [row + 1 for row in data.path(request, data.kept[request])]
            assert rows in (0, *path)
            seen.add(len(path) - path.index(rows) if rows else 0)
    assert {0, 1, 2} <= seen


@pytest.mark.parametrize("backend", [TorchNativeStateBackend, StatesInTrees])
@pytest.mark.parametrize(("data", "more"), [("mild_decay", ""), ("unit_keys", ".null.snap16")])
def test_drafts_that_branch_pass(backend: type, data: str, more: str) -> None:
    name = TREE.format("gdn4x2", data, more if backend is TorchNativeStateBackend else "")
    found = [each for each in check_backend(backend, cases=[name], device="cpu") if each.case]
    assert [each.status for each in found] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("backend", "execution", "check", "hint"),
    [
        (faults.StateOfTheSibling, "eager", "matches-oracle", "continues its sibling"),
        (faults.TreeTakenForAChain, "eager", "matches-oracle", "used as a chain"),
        (faults.WindowOfTheParentLost, "eager", "conv-window-exact", ""),
        (faults.LinksOfTheCapture, "graph", "replay-follows-batch", ""),
        (faults.CommitsByDepth, "eager", "conv-window-exact", ""),
    ],
)
def test_mistakes_with_branches_are_named(backend: type, execution: str, check: str, hint: str) -> None:
    case = TREE.format("gdn4x2", "mild_decay", "")
    results = check_backend(backend, cases=[case], executions=[execution], device="cpu")
    (found,) = [each for each in results if each.case]
    first = next(finding for finding in found.findings if finding.check == check)
    assert hint in f"{first.headline} {first.where} {first.hint}"


def test_only_declared_kinds_get_branches() -> None:
    cases = [case for case in generate(DECLARED, ForwardMode.TARGET_VERIFY, "core") if case.topk > 1]
    assert {case.heads.family for case in cases} == {"gdn", "kda"}
    assert {case.state.rollback for case in cases if case.state} == {"commit"}
    assert any(case.data == "unit_keys" for case in cases)
    assert any(case.topk > 1 for case in generate(DECLARED, ForwardMode.TARGET_VERIFY, "smoke"))
    chains = StateParent.capabilities
    assert not [case for case in generate(chains, ForwardMode.TARGET_VERIFY, "full") if case.topk > 1]
    mamba = parse_case(TREE.format("mamba4x2", "mild_decay", ""))
    assert "in layers of kind mamba" in str(not_declared(DECLARED, mamba))
    with pytest.raises(ValueError, match="a draft is a chain"):
        parse_case(TREE.format("gdn4x2", "mild_decay", ".slots"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bounds": {"max_topk": 1}}, "branch need both"),
        ({"state": State(k_dims={64})}, "branch need both"),
        ({"state": State(k_dims={64}, trees={"mamba"}), "heads": {"families": {"gdn"}}}, "branch need both"),
        ({"state": State(k_dims={64}, trees={"gdn"}, rollback={"slots"})}, "rollback 'commit'"),
    ],
)
def test_trees_and_topk_go_together(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DECLARED.with_changes(**changes)


def test_slots_of_a_big_pool_lie_at_both_of_its_ends() -> None:
    big, usual = (make_schedule(parse_case(name)) for name in (BIG, BIG.replace(".bigpool", "")))
    places, count, elements = state_places(big), state_pool_slots(big), 8 * 64 * 64
    assert places[0] == 0
    assert len(set(places.tolist())) == len(places) == count
    assert (places * elements >= 1 << 31).sum() == (count - 1) // 2
    assert state_places(usual).tolist() == list(range(state_pool_slots(usual)))
    for step in big.steps:
        far = places[make_state_data(big, step).slots] * elements >= 1 << 31
        assert far.any() == bool(step.requests)
        assert far.all() == (step.bs < 2)


@pytest.mark.parametrize(
    ("backend", "case", "status"),
    [
        (StateParent, BIG, "passed"),
        (OffsetOfASlotIn32Bits, BIG, "failed"),
        (OffsetOfASlotIn32Bits, BIG.replace(".bigpool", ""), "passed"),
    ],
)
def test_offsets_of_32_bits_are_caught_and_others_pass(backend: type, case: str, status: str) -> None:
    results = check_backend(backend, cases=[case], executions=["eager"], device="cpu")
    assert [each.status for each in results if each.case] == [status]


def test_big_pools_are_in_core_and_of_every_kind_in_full() -> None:
    def kinds(mode: str, tier: str) -> set[str]:
        cases = generate(DECLARED, ForwardMode(mode), tier)
        return {case.heads.family for case in cases if case.state and case.state.big}

    assert [len(kinds(mode, "core")) for mode in ("decode", "extend", "target-verify")] == [1, 1, 0]
    assert kinds("target-verify", "full") == DECLARED.heads.families
    assert not kinds("decode", "smoke")
