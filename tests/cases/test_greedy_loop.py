"""The layout of a lossless loop: whose slots, how much of a draft is kept, and which rows are due in which round."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.steps.greedy_loop import Loop, loop_modes, make_loop, make_vocabulary

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


def test_a_backend_of_fp8_pools_alone_has_no_loop() -> None:
    declared = TorchNativeBackend.capabilities
    assert any(case.rounds for case in generate(declared, ForwardMode.DRAFT_DECODE, "core"))
    fp8 = declared.with_changes(kv_dtypes={"fp8_e4m3"})
    assert {case.kv_dtype for case in generate(fp8, ForwardMode.DRAFT_DECODE, "core")} == {"fp8_e4m3"}
