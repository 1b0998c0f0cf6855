"""What was never written, what was rounded on its way, and requests without KV tokens in a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_other_places_by_hand import attended, evidence, right, schedule_of, with_data

from attn_testkit.diagnosis.hints import hints
from attn_testkit.diagnosis.hints.batch import last_request_not_written, only_empty_splits
from attn_testkit.diagnosis.hints.heads import columns_not_written
from attn_testkit.diagnosis.hints.keys import elsewhere, key_range
from attn_testkit.diagnosis.hints.numbers import right_keys
from attn_testkit.diagnosis.hints.values import nothing_computed
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import Schedule

VERIFY = schedule_of("target-verify-gqa2x2-d64-bf16-p4-k9.20.3-chain3-shuffled-gauss-b3prod")
RANKS = schedule_of("decode-gqa2x2-d32-fp32-p4-k1.9.3.20.2.11-shuffled-gauss-lsepages2merged-b6prod")
"""Requests 0, 2 and 4 have one page, and so no KV token on rank 1; 2 and 4 stand behind others."""
POISON = torch.tensor([-1], dtype=torch.int32).view(torch.float32)


def unwritten(schedule: Schedule, *places: Any) -> torch.Tensor:
    out = right(schedule)
    for place in places:
        out[place] = POISON
    return out


def test_the_last_request_that_is_not_written_is_an_entry_too_few() -> None:
    said = "no row of request 2, the last one, is written, and all others are right"
    found = evidence(VERIFY, unwritten(VERIFY, (slice(None), slice(6, 9))))
    assert hints(found) == [last_request_not_written(found)]
    assert hints(found)[0].endswith(said)
    for places in (
        [(slice(None), slice(6, 8))],
        [(slice(None), slice(3, 6))],
        [(slice(None), slice(6, 9)), (0, 1)],
        [(slice(None), slice(0, 9))],
        [(0, slice(6, 9))],
    ):
        assert last_request_not_written(evidence(VERIFY, unwritten(VERIFY, *places))) == ""
    for why in ("reads_foreign", "computes_nan"):
        nan = evidence(VERIFY, unwritten(VERIFY, (slice(None), slice(6, 9))), **{why: True})
        assert last_request_not_written(nan) == "", "a NaN of another slot may have the bits of poison"
    alone = schedule_of("decode-gqa2x2-d32-fp32-p4-k9-shuffled-gauss-b1prod")
    assert last_request_not_written(evidence(alone, unwritten(alone, (slice(None),)))) == "", "it is the first, too"


def test_values_of_a_head_that_are_not_written_are_named_with_what_the_others_hold() -> None:
    every = (slice(None), slice(None), slice(None))
    plain = evidence(VERIFY, unwritten(VERIFY, (*every, slice(32, 64))))
    reported = columns_not_written(plain)
    assert reported == (
        "a grid over a head's values is too small, or a tile of them has a wrong offset: values 32-63 of 64 of a head "
        "are never written"
    )
    assert hints(plain) == [reported]
    nan = evidence(VERIFY, unwritten(VERIFY, (*every, slice(32, 64))), reads_foreign=True)
    assert columns_not_written(nan) == ""
    out = unwritten(VERIFY, (*every, slice(32, 64)))
    out[..., :32] = right(VERIFY)[..., 32:]
    reported = columns_not_written(evidence(VERIFY, out))
    assert reported.endswith("never written, and the others hold what those 32 behind them should")
    out = unwritten(VERIFY, (*every, slice(0, 32)))
    out[..., 32:] = right(VERIFY)[..., :32]
    assert columns_not_written(evidence(VERIFY, out)).endswith("hold what those 32 before them should")
    out[0, 0, 0, 33] += 9
    assert "hold" not in columns_not_written(evidence(VERIFY, out))
    for places in ([(*every, slice(0, 48)), (0, 0, 0)], [(0, 0)], []):
        assert columns_not_written(evidence(VERIFY, unwritten(VERIFY, *places))) == ""


def of_requests(*wrong: int) -> str:
    out = right(RANKS)
    out[:, list(wrong)] += 9
    return only_empty_splits(evidence(RANKS, out))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((0, 2, 4), "gets weight in the merge: only requests without a KV token in rank 1 of 2 are wrong"),
        ((1, 3, 5), "a split: only requests after one without a KV token in rank 1 of 2 are wrong"),
        ((0, 2), ""),
        ((0, 2, 4, 5), ""),
        ((1, 3), ""),
        ((0, 1, 2, 3, 4, 5), ""),
    ],
)
def test_requests_without_a_part_or_behind_such_are_named_where_they_alone_are_wrong(
    wrong: tuple[int, ...], said: str
) -> None:
    reported = of_requests(*wrong)
    assert reported.endswith(said)
    assert bool(reported) is bool(said)


def test_a_window_leaves_a_part_without_kv_tokens_in_its_own_layer() -> None:
    schedule = schedule_of("decode-gqa2x2-d32-fp32-p4-k1.9.3.20.2.11-shuffled-gauss-w0one-lsepages2merged-b6prod")
    own = [layer.sliding_window_size for layer in make_layers(schedule.case)].index(0)
    for layer, said in ((own, True), (1 - own, False)):
        out = right(schedule)
        out[layer, [0, 1, 2, 4, 5]] += 9
        reported = only_empty_splits(evidence(schedule, out))
        assert reported.endswith("only requests without a KV token in rank 1 of 2 are wrong") is said


def test_values_that_are_rounded_to_fp8_on_their_way_are_reported_from_wrong_weights() -> None:
    rounded = right(VERIFY).to(torch.float8_e4m3fn).float()
    same = attended(VERIFY, 0)
    said = "the output is rounded to FP8"
    assert right_keys(evidence(VERIFY, rounded, attended=same)).startswith(said)
    scaled = (right(VERIFY) / 0.3).to(torch.float8_e4m3fn).float() * 0.3
    assert right_keys(evidence(VERIFY, scaled, attended=same)).startswith(said)
    # Weights in FP8 leave errors of the same size, and any values.
    drawn = torch.rand(rounded.shape, generator=torch.Generator().manual_seed(0)) / 8 + 15 / 16
    assert said not in right_keys(evidence(VERIFY, right(VERIFY) * drawn, attended=same))
    rounded[0, 0, 0, 0] *= 1.2
    assert "the output is rounded to FP8" not in right_keys(evidence(VERIFY, rounded, attended=same))
    steeper = with_data(VERIFY, q=evidence(VERIFY, rounded).expected.data.q * 1.1)
    assert "the output is rounded to FP8" not in right_keys(evidence(VERIFY, steeper, attended=same))


def test_zeros_beside_right_steps_of_the_case_are_no_matter_of_what_these_have_as_well() -> None:
    zeros = evidence(VERIFY, torch.zeros_like(right(VERIFY)))
    assert "head dim" in nothing_computed(zeros)
    beside = evidence(VERIFY, torch.zeros_like(right(VERIFY)), passed=[zeros.observed])
    reported = nothing_computed(beside)
    assert "and other steps of the case are right" in reported
    assert "head dim" not in reported
    assert "one new row" not in reported
    lone = schedule_of("extend-gqa2x2-d32-fp32-p4-k0-n1a1-shuffled-gauss-b1prod")
    beside = evidence(lone, torch.zeros_like(right(lone)), passed=[zeros.observed])
    assert "returns early: here one new row, and no KV token before it" in nothing_computed(beside)


@pytest.mark.parametrize(("page", "said"), [(4, True), (1, False)])
def test_a_page_of_one_slot_is_never_partly_full(page: int, said: bool) -> None:
    schedule = schedule_of(f"decode-gqa2x2-d32-fp32-p{page}-k9.20-shuffled-gauss-b2prod")
    found = evidence(schedule, right(schedule), attended=attended(schedule, 0, elsewhere_of={"unowned": 0.1}))
    assert elsewhere(found).startswith("all of its own KV tokens are read, and slots after them")
    assert ("a last page that counts as full" in elsewhere(found)) is said


DRAFT = schedule_of("draft-decode-gqa2x2-d32-fp32-p2-k7.8-topk3steps6-shared-gauss-b2small")


def test_what_a_branch_of_a_draft_reads_is_reported_by_its_own_pages() -> None:
    wanted = (*range(7), 12)
    tail = attended(DRAFT, 0, 5, used=range(6), wanted=wanted, elsewhere_of={"tail": 0.25})
    found = evidence(DRAFT, right(DRAFT), attended=tail)
    assert elsewhere(found).startswith("slots that hold no KV token of this branch are read in pages of its draft")
    assert key_range(found).startswith("KV tokens 6, 12 are missing, which a branch has in its own pages")
    for used in ((*range(5), 12), (*range(6), 12)):
        other = attended(DRAFT, 0, 5, used=used, wanted=wanted)
        assert "a branch has" not in key_range(evidence(DRAFT, right(DRAFT), attended=other))
