"""Words for numbers and places, and which checks were judged at all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace as Of

import pytest
import torch
from by_hand import (
    DECODE,
    V1_TOP1,
    V1_TOP3,
    VERIFY,
    empty_pool,
    expected_zeros,
    observation,
    schedule_of,
    with_pool,
)

from attn_testkit.checks.describe import index_ranges, number, requests_wrong, row_name, spread_text, times
from attn_testkit.checks.memory import writes_own_kv
from attn_testkit.checks.misplaced import _group_alone, _neighbours, _scaled, _some_heads
from attn_testkit.steps.data import make_layers


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.0, "just"),
        (1.004, "just"),
        (1.005, "1.00x"),
        (1.02, "1.02x"),
        (1.994, "1.99x"),
        (2.0, "2x"),
        (3.44, "3.4x"),
        (9.94, "9.9x"),
        (10.0, "10x"),
        (56.4, "56x"),
        (999999.0, "999999x"),
        (1e6, "over a million times"),
        (float("inf"), "over a million times"),
    ],
)
def test_a_ratio_is_as_exact_as_one_needs_it(ratio: float, text: str) -> None:
    assert times(ratio) == text


def test_numbers_and_ranges() -> None:
    assert [number(x) for x in (float("nan"), float("inf"), 1e-30, 0.123456)] == ["nan", "inf", "1e-30", "0.1235"]
    assert index_ranges([]) == ""
    assert index_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert index_ranges([3, 3]) == "3, 3"


def test_a_row_is_named_where_a_request_has_several() -> None:
    one, several = (expected_zeros(schedule_of(case)).data for case in (DECODE, VERIFY))
    assert [row_name(one, row) for row in range(3)] == ["request 0", "request 1", "request 2"]
    assert row_name(several, 0) == "request 0 row 0"
    two = expected_zeros(schedule_of(V1_TOP1)).data
    assert [row_name(two, row) for row in (0, 1, 2)] == ["request 0 row 0", "request 0 row 1", "request 1 row 0"]
    assert row_name(several, len(several.row_request) - 1) == f"request 1 row {int(several.row_offset[-1])}"


STEP = schedule_of(VERIFY).steps[0]
"""Two requests, four rows each."""
ROWS = expected_zeros(schedule_of(VERIFY)).data.row_request


def wrong(*at: tuple[object, ...]) -> torch.Tensor:
    found = torch.zeros(len(ROWS), 4, 32, dtype=torch.bool)
    for place in at:
        found[place] = True
    return found


def test_which_requests_are_wrong() -> None:
    assert requests_wrong(wrong((0, 0, 0)), ROWS, 2) == [0]
    assert requests_wrong(wrong((-1, 3, 31)), ROWS, 2) == [1]
    assert requests_wrong(wrong(), ROWS, 2) == []
    assert requests_wrong(wrong((0,), (-1,))[:, 0, 0], ROWS, 2) == [0, 1]


N = len(ROWS) // 2
SPREADS = [
    (((0, 0, 5),), f"request 0 wrong in 1 of {N * 128} values (1 of {N} rows: 0); request 1 right; only head 0 of 4"),
    (((slice(0, N),),), f"request 0 wrong in {N * 128} of {N * 128} values ({N} of {N} rows); request 1 right"),
    (((slice(None),),), f"requests 0-1 wrong in {N * 256} of {N * 256} values ({2 * N} of {2 * N} rows)"),
    (((1,), (N + 1,)), f"requests 0-1 wrong in 256 of {N * 256} values (2 of {2 * N} rows: 1)"),
    (((1,), (N + 2,)), f"requests 0-1 wrong in 256 of {N * 256} values (2 of {2 * N} rows)"),
    (
        ((0, slice(1, 3)), (1, slice(1, 3))),
        f"request 0 wrong in 128 of {N * 128} values (2 of {N} rows: 0-1); request 1 right; "
        "only heads 1-2 of 4 in every wrong row",
    ),
    (
        ((0, slice(1, 3)),),
        f"request 0 wrong in 64 of {N * 128} values (1 of {N} rows: 0); request 1 right; only heads 1-2 of 4",
    ),
    (
        ((0, 1, 5), (1, 1, 6)),
        f"request 0 wrong in 2 of {N * 128} values (2 of {N} rows: 0-1); request 1 right; "
        "only head 1 of 4 in every wrong row",
    ),
    (
        ((0, 1), (1, 2)),
        f"request 0 wrong in 64 of {N * 128} values (2 of {N} rows: 0-1); request 1 right; only heads 1-2 of 4",
    ),
    (
        ((0, slice(None), slice(8, 16)),),
        f"request 0 wrong in 32 of {N * 128} values (1 of {N} rows: 0); request 1 right; only dims 8-15 of 32",
    ),
    (
        ((0, 1, slice(8, 16)),),
        f"request 0 wrong in 8 of {N * 128} values (1 of {N} rows: 0); request 1 right; "
        "only head 1 of 4; only dims 8-15 of 32",
    ),
    (
        ((0, 1, slice(8, 12)), (1, 2, slice(12, 16))),
        f"request 0 wrong in 8 of {N * 128} values (2 of {N} rows: 0-1); request 1 right; "
        "only heads 1-2 of 4; only dims 8-15 of 32",
    ),
    (
        ((0, slice(None), slice(8, 15)),),
        f"request 0 wrong in 28 of {N * 128} values (1 of {N} rows: 0); request 1 right",
    ),
    (
        ((0, slice(None), slice(6, 14)),),
        f"request 0 wrong in 32 of {N * 128} values (1 of {N} rows: 0); request 1 right",
    ),
    (
        ((0, slice(None), slice(8, 12)), (0, slice(None), slice(16, 20))),
        f"request 0 wrong in 32 of {N * 128} values (1 of {N} rows: 0); request 1 right",
    ),
]


@pytest.mark.parametrize(("places", "text"), SPREADS, ids=range(len(SPREADS)))
def test_how_far_a_difference_spreads(places: tuple[tuple[object, ...], ...], text: str) -> None:
    assert spread_text(wrong(*places), ROWS, STEP) == text


def test_rows_are_named_where_right_ones_stand_beside_them_in_every_wrong_request() -> None:
    schedule = schedule_of(V1_TOP3)
    step, rows = schedule.steps[0], expected_zeros(schedule).data.row_request
    assert rows.tolist() == [0, 1, 1, 1]
    first_of_each = torch.zeros(4, 4, 32, dtype=torch.bool)
    first_of_each[:2] = True
    assert spread_text(first_of_each, rows, step) == "requests 0-1 wrong in 256 of 512 values (2 of 4 rows)"


def test_where_nothing_is_wrong_no_part_is_named() -> None:
    assert spread_text(wrong(), ROWS, STEP).endswith("requests 0-1 right")


def test_what_has_no_heads_names_none() -> None:
    flat = wrong((0, 0, 5))[:, 0]
    assert (
        spread_text(flat, ROWS, STEP) == f"request 0 wrong in 1 of {N * 32} values (1 of {N} rows: 0); request 1 right"
    )


# What a slot holds instead.

SCHEDULE = schedule_of(DECODE)
PAGE = SCHEDULE.case.page_size


def pool_hint(
    *rows: tuple[int, int, int, float], stored: bool = False, want: tuple[tuple[int, int, int, float], ...] = ()
) -> str:
    """(layer, part, slot, value) of what is held, where 0 is elsewhere; and of what should be."""
    step = replace(SCHEDULE.steps[0], stored=stored)
    expected = expected_zeros(SCHEDULE)
    seen = observation(SCHEDULE, expected, step=step)
    after, held = empty_pool(SCHEDULE), empty_pool(SCHEDULE)
    for layer, part, slot, value in want:
        after[layer, part, slot] = held[layer, part, slot] = value
    for layer, part, slot, value in rows:
        held[layer, part, slot] = value
    (finding,) = writes_own_kv(with_pool(seen, expected, after, held), SCHEDULE.case)
    return finding.hint


NEW = [int(r.slots[r.prefix]) for r in SCHEDULE.steps[0].requests]
OLD = int(SCHEDULE.steps[0].requests[1].slots[0])
OWNED = {int(slot) for request in SCHEDULE.steps[0].requests for slot in request.slots}


def distinct() -> tuple[tuple[int, int, int, float], ...]:
    """Each new row of each layer and part has a number of its own."""
    return tuple((a, b, slot, 1.0 + 10 * a + 5 * b + i) for a in (0, 1) for b in (0, 1) for i, slot in enumerate(NEW))


SEVERAL = schedule_of("target-verify-gqa2x2-d32-fp32-p4-k9.2-chain4-shuffled-gauss-b2prod")


def moved_hint(moves: dict[int, int]) -> str:
    """New rows that lie in other slots: slot -> slot; what should lie there is overwritten."""
    expected, step = expected_zeros(SEVERAL), SEVERAL.steps[0]
    after, held = empty_pool(SEVERAL), empty_pool(SEVERAL)
    new = [int(slot) for request in step.requests for slot in request.slots[request.prefix :]]
    for at, slot in enumerate(new):
        after[:, :, slot] = 1.0 + at
        if slot not in moves:
            held[:, :, slot] = 1.0 + at
    for of, to in moves.items():
        held[:, :, to] = 1.0 + new.index(of)
    (finding,) = writes_own_kv(with_pool(observation(SEVERAL, expected), expected, after, held), SEVERAL.case)
    return finding.hint


def test_new_rows_that_are_all_as_far_off_say_by_how_much() -> None:
    first, second = ([int(slot) for slot in request.slots] for request in SEVERAL.steps[0].requests)
    far = [
        slot for slot in range(SEVERAL.case.page_size, empty_pool(SEVERAL).shape[2]) if slot not in {*first, *second}
    ]
    back = {first[9 + i]: first[7 + i] for i in range(4)} | {second[2 + i]: second[i] for i in range(4)}
    assert "new rows are stored 2 positions too far back: probably the length or prefix" in moved_hint(back)
    on = {first[9]: first[12], first[10]: far[0], first[11]: far[3], first[12]: far[1]}
    on |= {second[2]: second[5], second[3]: far[2], second[4]: far[5], second[5]: far[4]}
    assert "new rows are stored 3 positions too far forward" in moved_hint(on), "behind the end a table names any slot"
    assert "row order, a stride, or a wrong slot" in moved_hint({**on, second[2]: second[4]})
    assert "row order, a stride, or a wrong slot" in moved_hint({first[9]: first[8]}), "one row is nobody's pattern"
    free = set(far)
    step = next(n for n in range(-40, 40) if {first[9] + n, second[2] + n} <= free)
    apart = {first[9]: first[9] + step, second[2]: second[2] + step}
    assert f"new rows are {step:+d} slots off: look at how out_cache_loc becomes an address" in moved_hint(apart)


def padding_hint(*slots: int, bucket: int, replay: bool = True) -> str:
    step, expected = replace(SCHEDULE.steps[0], bucket=bucket), expected_zeros(SCHEDULE)
    after, held = empty_pool(SCHEDULE), empty_pool(SCHEDULE)
    for slot in slots:
        held[0, 0, slot] = 99.0
    seen = observation(SCHEDULE, expected, step=step, replay=replay)
    (finding,) = writes_own_kv(with_pool(seen, expected, after, held), SCHEDULE.case)
    return finding.hint


def test_slots_that_rows_of_padding_may_have_written_are_reported_as_that() -> None:
    live, stray = SCHEDULE.steps[0].bs, [slot for slot in range(PAGE, 9 * PAGE) if slot not in OWNED][:2]
    said = "the new tokens are in the right slots, but other slots were written too (2), probably by padded rows (2)."
    assert padding_hint(*stray, bucket=live + 2).startswith(said)
    assert "were written too (1), probably by padded rows (1)." in padding_hint(OLD, bucket=live + 1)
    assert padding_hint(*stray, bucket=live + 1) == "", "more slots than rows of padding"
    assert padding_hint(*stray, bucket=live) == ""
    assert padding_hint(*stray, bucket=live + 2, replay=False) == "", "an eager run has none"
    assert "no live row of this step: a padded row was stored over it. Padding belongs" in padding_hint(
        NEW[0], bucket=live + 1
    )
    assert "padding" not in padding_hint(NEW[0], bucket=live)
    assert "padding" not in padding_hint(*NEW[:2], bucket=live + 1)
    assert "FP8" not in padding_hint(NEW[0], bucket=live)


def test_heads_of_a_row_that_alone_are_wrong_are_named() -> None:
    want = torch.arange(1, 7).view(3, 2)
    one, two = want.clone(), want.clone()
    one[1] += 1
    two[1:] += 1
    assert _some_heads(one, want).startswith("KV head 1 of 3 is wrong in it, and the others are right")
    assert _some_heads(two, want).startswith("KV heads 1-2 of 3 are wrong in it, and the others are right")
    assert _some_heads(want + 1, want) == "", "no head is right"


def test_whose_row_a_wrong_slot_holds_is_said() -> None:
    want = distinct()
    assert "row of the new token at position" in pool_hint((0, 0, NEW[0], 2.0), want=want)
    assert "of request 1: probably the row order" in pool_hint((0, 0, NEW[0], 2.0), want=want)
    assert pool_hint((0, 0, NEW[0], 6.0), want=want) == "it holds K instead of V, or V instead of K"
    assert pool_hint((0, 0, NEW[0], 11.0), want=want) == "it holds the other layer's row"
    assert pool_hint((0, 0, NEW[0], 0.0), want=want).startswith("it was not written, or a padded row")
    assert pool_hint((0, 0, NEW[0], 99.0), want=want).startswith(
        "it holds no live row of this step: k and v may be strided"
    )
    assert pool_hint((0, 0, OLD, 99.0), want=want) == ""
    assert pool_hint((0, 0, NEW[0], 0.0), want=want).endswith(
        "overwrote it with NaN, only in layer 0: look at what is special about these layers, such as a window, a KV "
        "group or other "
        "slots"
    )
    both = ((0, 0, NEW[0], 0.0), (1, 0, NEW[0], 0.0))
    assert pool_hint(*both, want=want) == "it was not written, or a padded row overwrote it with NaN"
    assert "row of the new token" in pool_hint((0, 0, OLD, 1.0), want=want)
    assert pool_hint((0, 0, NEW[0], 2.0), want=want, stored=True).startswith("save_kv_cache was False")


@pytest.mark.parametrize(
    ("held", "rounding"),
    [
        ((0x31, 0x2F, 0x30), True),
        ((0x30, 0x30, 0x31), True),
        ((0x32, 0x30, 0x30), False),
        ((0xB1, 0x30, 0x30), False),
        ((0x30, 0x30, 0x30), False),
    ],
)
def test_numbers_of_fp8_beside_the_right_ones_are_rounded(held: tuple[int, ...], rounding: bool) -> None:
    want, pool = torch.full((3,), 0x30, dtype=torch.uint8), torch.empty(1, dtype=torch.float8_e4m3fn)
    row = torch.tensor(held, dtype=torch.uint8)
    assert _neighbours(Of(pool=pool), row, want) is rounding
    assert not _neighbours(Of(pool=torch.empty(1)), row, want)


def test_zero_and_the_smallest_number_below_it_are_no_neighbours() -> None:
    pool = torch.empty(1, dtype=torch.float8_e4m3fn)
    assert not _neighbours(
        Of(pool=pool), torch.tensor([0x80], dtype=torch.uint8), torch.tensor([0x7F], dtype=torch.uint8)
    )


FP8 = schedule_of("decode-gqa2x2-d32-fp16-p4-k9.6-shuffled-gauss-kvfp8e4m3-b2prod")


def scaled_hint(
    factor: float, layer: int = 0, part: int = 0, off: float = 1.0, dtype: torch.dtype | None = None
) -> str:
    values = torch.linspace(0.25, 4.0, 16)
    held = values * factor
    held[3] *= off
    fp8 = torch.float8_e4m3fn
    seen = Of(pool=torch.empty(1, dtype=dtype or fp8), schedule=FP8)
    return _scaled(seen, held.to(fp8).view(torch.uint8), values.to(fp8).view(torch.uint8), layer, part)


@pytest.mark.parametrize(("layer", "part"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_numbers_of_fp8_that_lack_their_scale_or_have_it_twice_are_named(layer: int, part: int) -> None:
    own = make_layers(FP8.case)[layer]
    scale, name, what = (own.v_scale, "v_scale", "V") if part else (own.k_scale, "k_scale", "K")
    assert max(scale, 1 / scale) >= 1.5, "else nothing could be told"
    assert scaled_hint(scale, layer, part) == f"it holds unscaled {what}: an FP8 pool holds {what} / {name}"
    assert scaled_hint(scale**2, layer, part) == f"it holds {what} * {name}: an FP8 pool holds {what} / {name}"
    assert scaled_hint(1 / scale, layer, part) == f"it holds {what} divided by {name} twice"
    assert scaled_hint(1.0, layer, part) == ""
    assert scaled_hint(scale, layer, part, off=1.5) == "", "one number is another"
    assert scaled_hint(scale, layer, part, dtype=torch.float16) == ""


GROUPS = schedule_of("decode-gqa2x2-d64-bf16-p16-k39.70.6-shared-gauss-w7-layers3from5groups-b4prod")


@pytest.mark.parametrize(
    ("layers", "said"),
    [((1,), True), ((0,), False), ((0, 2), False), ((0, 1, 2), False), ((1, 2), False), ((), False)],
)
def test_new_rows_that_are_wrong_in_one_further_kv_group_alone_name_its_slots(
    layers: tuple[int, ...], said: bool
) -> None:
    got, want, new = torch.zeros(3, 2, 4, 1, 1), torch.zeros(3, 2, 4, 1, 1), torch.tensor([1, 2])
    got[list(layers), 0, 1] = 1.0
    reported = _group_alone(Of(schedule=GROUPS), got, want, new)
    assert bool(reported) is said
    if said:
        assert reported.startswith(", only in the layers of KV group 1")


def test_a_row_of_nan_that_is_not_an_unowned_slots_was_made_with_what_was_there() -> None:
    slot = NEW[0]
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32).item()
    assert "the old contents of the slot were probably added to or scaled" in pool_hint(
        (0, 0, slot, other_nan), want=distinct()
    )
    assert "no live row of this step" in pool_hint((0, 0, slot, 77.0), want=distinct())
