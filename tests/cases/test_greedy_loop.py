"""The layout of a lossless loop: whose slots, how much of a draft is kept, and which rows are due in which round."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_hybrid import TorchNativeHybridBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.contract.state import ROLLBACKS
from attn_testkit.steps.greedy_loop import Loop, loop_modes, make_loop, make_vocabulary
from attn_testkit.steps.verify_loop import VerifyLoop, make_verify_loop, verify_loop_runs

CASE = "draft-decode-gqa2x2-d64-bf16-p{page}-k{prefixes}-topk{k}steps{s}-loop{rounds}-shuffled-gauss-b4prod"


def loop_of(page: int = 4, prefixes: str = "17.32.1", k: int = 2, s: int = 3, rounds: int = 4) -> Loop:
    case = parse_case(CASE.format(page=page, prefixes=prefixes, k=k, s=s, rounds=rounds))
    return make_loop(case, loop_modes(case, set(ForwardMode)))


def test_rows_that_are_due_are_those_of_accepted_tokens() -> None:
    loop = replace(loop_of(prefixes="4.1", s=3), kept=np.zeros((2, 2), np.int64))
    due = list(loop.due([[3, 0], [1, 2]]))
    assert [len(prompt) for prompt in loop.prompts] == [5, 2]
    assert due == [
        # Round 1: one new token each; the last token of the prompt stands at 4, and at 1.
        ("round 1, draft-extend", 0, 4),
        # Of the draft the last token is not fed to it again.
        ("round 1, draft-decode", 0, 5),
        ("round 1, draft-decode", 0, 6),
        *(("round 1, target-verify", 0, at) for at in (4, 5, 6, 7)),
        ("round 1, draft-extend", 1, 1),
        ("round 1, target-verify", 1, 1),
        # Round 2: as many new tokens as were accepted and one. Draft-extends take turns.
        *(("round 2, draft-extend-v2", 0, at) for at in (5, 6, 7, 8)),
        ("round 2, draft-decode", 0, 9),
        *(("round 2, target-verify", 0, at) for at in (8, 9)),
        ("round 2, draft-extend-v2", 1, 2),
        *(("round 2, draft-decode", 1, at) for at in (3, 4)),
        *(("round 2, target-verify", 1, at) for at in (2, 3, 4)),
    ]


@pytest.mark.parametrize(("page", "k", "s"), [(1, 1, 3), (4, 2, 3), (16, 3, 2)])
def test_target_and_draft_of_every_request_have_pages_of_their_own(page: int, k: int, s: int) -> None:
    loop = loop_of(page, k=k, s=s)
    assert loop.table.shape[0] == 1 + 2 * 3
    slots = loop.table[1:]
    pages, within = np.divmod(slots, page)
    assert (within == np.arange(slots.shape[1]) % page).all()
    owned = pages[:, ::page].ravel()
    assert sorted(owned.tolist()) == list(range(1, owned.size + 1)), "page 0 is nobody's, and no page has two owners"
    assert {schedule.num_pages for schedule in loop.schedules} == {owned.size}
    assert {schedule.max_context_len for schedule in loop.schedules} == {slots.shape[1]}


def test_a_request_has_room_for_its_longest_text_and_a_draft_behind_it_and_no_more() -> None:
    # A prompt of 6, 4 tokens of each round, then a draft of 3 and a tree of 4 nodes.
    assert loop_of(1, "5", k=1, s=3, rounds=1).table.shape[1] == 17
    assert loop_of(1, "5", k=1, s=3, rounds=2).table.shape[1] == 21


def test_a_whole_draft_is_kept_first_then_nothing_then_anything_between() -> None:
    kept = loop_of(rounds=40, s=3).kept
    assert kept[:2].tolist() == [[3, 3, 3], [0, 0, 0]]
    assert set(kept[2:].ravel().tolist()) == {0, 1, 2, 3}
    assert loop_of(rounds=1).kept.tolist() == [[3, 3, 3]]


def test_the_tree_of_a_loop_is_chains_from_the_root_level_by_level() -> None:
    verify = next(s for s in loop_of(k=2, s=3).schedules if s.case.mode is ForwardMode.TARGET_VERIFY)
    assert verify.case.tree is not None
    assert verify.case.tree.parents == (0, 0, 1, 2, 3, 4)


def test_the_same_id_gives_the_same_loop_as_ever() -> None:
    loop = loop_of()
    laid = repr((loop.prompts, loop.kept.tolist(), loop.table.tolist()))
    words = make_vocabulary(loop.schedules[0].case)
    digest = hashlib.sha256(laid.encode())
    for each in (words.q, words.k, words.v, words.hidden):
        digest.update(each.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == "d15651e32ce29977"


def loops(declared: Capabilities, mode: ForwardMode = ForwardMode.DRAFT_DECODE) -> list[Case]:
    return [case for case in generate(declared, mode, "core") if case.rounds]


def test_one_loop_has_all_options_that_are_declared_for_its_modes_and_another_none() -> None:
    plain, optional = loops(TorchNativeBackend.capabilities)
    assert (plain.window, plain.sinks, plain.logit_cap, plain.kv_dtype) == (-1, False, 0.0, "same")
    assert optional.draft is not None
    assert optional.draft.branches == 2
    assert optional.window == 11 < max(optional.prefixes)
    assert optional.sinks
    assert optional.logit_cap > 0
    assert optional.kv_dtype == "fp8_e4m3"


@pytest.mark.parametrize(
    ("changes", "window", "kv_dtype"),
    [
        ({"windows": {ForwardMode.DRAFT_DECODE}}, -1, "fp8_e4m3"),
        ({"windows": {"in_trees": False}}, -1, "fp8_e4m3"),
        ({"precision": {"new_rows_as_given": {ForwardMode.TARGET_VERIFY}}}, 11, "same"),
        ({"precision": {"matmul_dtype": "fp8_e4m3", "q_scale": "per_token"}}, 11, "same"),
        ({"kv_pool": {"kv_dtypes": {"same"}}}, 11, "same"),
    ],
)
def test_an_option_that_a_mode_of_the_loop_does_not_take_is_left_out(
    changes: dict[str, Any], window: int, kv_dtype: str
) -> None:
    optional = loops(TorchNativeBackend.capabilities.with_changes(**changes))[1]
    assert (optional.window, optional.kv_dtype) == (window, kv_dtype)
    assert optional.sinks


def test_a_backend_of_fp8_pools_alone_has_loops_of_them() -> None:
    declared = TorchNativeBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_e4m3"}})
    assert {case.kv_dtype for case in loops(declared)} == {"fp8_e4m3"}


def test_a_backend_of_packed_rows_alone_has_cases_and_no_loop() -> None:
    declared = TorchNativeBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"int8_per_token_head"}},
        precision={"dtypes": {"bf16"}},
        heads={"families": {"gqa"}, "heads_by_layer": False},
    )
    for mode in (ForwardMode.DRAFT_DECODE, ForwardMode.TARGET_VERIFY):
        assert generate(declared, mode, "smoke")
        assert loops(declared, mode) == []


def test_the_loop_of_target_verify_has_kv_groups_and_needs_decode_and_extend() -> None:
    declared, verify = TorchNativeBackend.capabilities, ForwardMode.TARGET_VERIFY
    (case,) = loops(declared, verify)
    assert case.layers.groups
    assert (case.window, case.sinks) == (11, True)
    (alone,) = loops(declared.with_changes(kv_pool={"kv_groups": False}), verify)
    assert not alone.layers.groups
    for missing in (ForwardMode.DECODE, ForwardMode.EXTEND):
        eager = declared.eager - {missing}
        assert loops(declared.with_changes(eager=eager, graph=declared.graph & eager), verify) == []


def test_loops_of_states_have_each_rollback_and_those_of_hybrids_each_kind() -> None:
    verify = ForwardMode.TARGET_VERIFY
    alone = loops(TorchNativeStateBackend.capabilities, verify)
    assert [case.state.rollback for case in alone if case.state] == [
        "commit",
        "slots",
        "slots_in_decode",
        "slots_moved",
    ]
    hybrids = loops(TorchNativeHybridBackend.capabilities, verify)
    assert [case.heads.family for case in hybrids] == ["gdn", "kda", "mamba", "lightning", "rwkv", "conv"]
    assert {case.state.rollback for case in hybrids if case.state} == set(ROLLBACKS)
    assert {(case.head_dim, case.state.k_dim) for case in [*alone, *hybrids] if case.state} == {(64, 64), (64, 0)}


VERIFY = "target-verify-gqa2x2-d64-bf16-p4-k{prefixes}-{draft}-loop{rounds}-shuffled-gauss-b4prod"


def verify_loop(prefixes: str = "9.4.1", draft: str = "chain4", rounds: int = 3) -> VerifyLoop:
    return make_verify_loop(parse_case(VERIFY.format(prefixes=prefixes, draft=draft, rounds=rounds)))


@pytest.mark.parametrize(
    ("accepted", "decodes"),
    [([[3, 3, 3], [3, 3, 3]], [3, 5]), ([[0, 3, 0], [0, 0, 0]], [3, 5]), ([[0, 0, 0], [2, 0, 1]], [3, 2])],
)
def test_as_many_tokens_are_decoded_as_the_request_that_is_farthest_needs(
    accepted: list[list[int]], decodes: list[int]
) -> None:
    loop = verify_loop()
    assert loop.decodes(accepted) == decodes
    prompts = [10, 5, 2]
    assert loop.lens(accepted)[3:] == [length + sum(decodes) for length in prompts]
    # A token of each round, and one that is decoded before the second draft.
    assert loop.lens(accepted)[0] == 10 + accepted[0][0] + accepted[1][0] + 3


def test_rows_that_are_due_in_a_loop_of_target_verify() -> None:
    due = list(verify_loop("2", rounds=2).due([[3], [1]]))
    assert due == [
        *(("prompts, extend", text, at) for text in (0, 1) for at in (0, 1)),
        *(("round 1, target-verify", 0, at) for at in (2, 3, 4, 5)),
        *(("round 1, decode", 1, at) for at in (2, 3, 4)),
        ("round 2, decode", 0, 6),
        *(("round 2, target-verify", 0, at) for at in (7, 8)),
        *(("round 2, decode", 1, at) for at in (5, 6, 7, 8, 9)),
    ]


def test_no_text_is_longer_than_its_row_of_the_request_table_and_none_shares_a_page() -> None:
    loop = verify_loop(rounds=5)
    longest = max(loop.lens([[3] * 3] * 5))
    # The last draft is verified behind all but its own round.
    assert loop.table.shape == (7, -(-(longest + 3) // 4) * 4)
    assert len(set(loop.table[1:].ravel().tolist())) == loop.table[1:].size
    assert 0 not in loop.table[1:]


@pytest.mark.parametrize("by", ["", ".slots"])
def test_slots_of_states_are_neither_rows_nor_places(by: str) -> None:
    case = parse_case(f"target-verify-gdn4x2-d64-bf16-p16-k17.9.1-chain4-loop4-shuffled-mild_decay-k64w4s32{by}-b4prod")
    slots = make_verify_loop(case).states()
    assert slots.shape == (6, 4 if by else 1)
    assert sorted(slots.ravel().tolist()) == list(range(1, slots.size + 1))
    assert all(slots[text, 0] not in (text, text + 1) for text in range(6))


def test_decode_has_graphs_but_with_a_slot_for_each_node() -> None:
    states = "target-verify-gdn4x2-d64-bf16-p16-k17.9.1-chain4-loop4-shuffled-mild_decay-k64w4s32{by}-b4prod"
    verify, decode, extend = ForwardMode.TARGET_VERIFY, ForwardMode.DECODE, ForwardMode.EXTEND
    for case_id, in_graphs in (
        (states.format(by=""), [verify, decode]),
        (states.format(by=".slots"), [verify]),
        (VERIFY.format(prefixes="9.4.1", draft="chain4", rounds=3), [verify, decode]),
    ):
        case = parse_case(case_id)
        assert [each.case.mode for each in make_verify_loop(case).in_graphs] == in_graphs
        assert verify_loop_runs(case, set(in_graphs), {decode, extend})
        assert not verify_loop_runs(case, set(in_graphs), {decode})
        assert not verify_loop_runs(case, {verify}, {extend})
        assert not verify_loop_runs(case, {decode}, {decode, extend})
    assert not verify_loop_runs(parse_case(states.format(by="").replace("-loop4", "")), {verify, decode}, {extend})


@pytest.mark.parametrize(
    "wrong", [{"prefixes": "9.0"}, {"draft": "t0.0.1"}, {"rounds": 0}], ids=["no prefix", "tree", "no rounds"]
)
def test_loops_of_target_verify_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"loop|prefix|rounds"):
        verify_loop(**wrong)
