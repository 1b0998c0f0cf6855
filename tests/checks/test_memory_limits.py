"""Memory that the kit owns: every slot from page 1 on, every bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from by_hand import DECODE, empty_pool, expected_zeros, observation, schedule_of, with_pool

from attn_testkit.checks.graphs import addresses_stable, padding_finite
from attn_testkit.checks.memory import inputs_unchanged, pool_is_right, writes_own_kv
from attn_testkit.checks.observation import Observation, copies_of

SCHEDULE = schedule_of(DECODE)
PAGE = SCHEDULE.case.page_size
LAST = empty_pool(SCHEDULE).shape[2] - 1
OWNED = {int(slot) for request in SCHEDULE.steps[0].requests for slot in request.slots}


def written(slot: int, layer: int = 0, part: int = 0) -> torch.Tensor:
    pool = empty_pool(SCHEDULE)
    pool[layer, part, slot, 0, 1] = 1.0
    return pool


@pytest.mark.parametrize(("slot", "same"), [(0, True), (PAGE - 1, True), (PAGE, False), (LAST, False)])
@pytest.mark.parametrize(("layer", "part"), [(0, 0), (1, 1)])
def test_padding_may_write_page_0_and_nothing_else(slot: int, same: bool, layer: int, part: int) -> None:
    pool = written(slot, layer, part)
    seen = observation(SCHEDULE, expected_zeros(SCHEDULE), pool=pool)
    assert pool_is_right(seen, PAGE) is same
    findings = writes_own_kv(seen, SCHEDULE.case)
    assert bool(findings) is not same
    for finding in findings:
        name, page, offset = "KV"[part], slot // PAGE, slot % PAGE
        assert finding.where.startswith(f"layer {layer}, {name}, slot {slot} (page {page}, offset {offset})")


def test_bits_are_compared_so_that_nan_equals_nan_and_minus_zero_is_another_number() -> None:
    def right(held: torch.Tensor, after: torch.Tensor) -> bool:
        expected = expected_zeros(SCHEDULE)
        return pool_is_right(with_pool(observation(SCHEDULE, expected), expected, after, held), PAGE)

    pool, other = empty_pool(SCHEDULE), empty_pool(SCHEDULE)
    pool[0, 0, PAGE] = other[0, 0, PAGE] = torch.nan
    assert right(pool, other)
    other[1, 1, LAST] = -0.0
    assert not right(pool, other)
    own = int(SCHEDULE.steps[0].requests[0].slots[-1])
    pool, other = empty_pool(SCHEDULE), empty_pool(SCHEDULE)
    other[0, 1, own] = -0.0
    assert not right(pool, other), "a slot of this step's tokens"


OWN = int(SCHEDULE.steps[0].requests[0].slots[-1])
ALLOWED = 0.25


def computed(slot: int, value: float, after: float = 1.0) -> Observation:
    """A step whose memory is computed, within ``ALLOWED``, and should hold ``after`` in its own slots."""
    expected, due = expected_zeros(SCHEDULE), empty_pool(SCHEDULE)
    due[0, 1, OWN] = after
    held = due.clone()
    held[0, 1, slot, 0, 1] = value
    seen = with_pool(observation(SCHEDULE, expected), expected, due, held)
    assert seen.inputs is not None
    limit = torch.full(seen.inputs.new_rows.shape, ALLOWED, dtype=torch.float64)
    return replace(seen, inputs=replace(seen.inputs, new_limit=limit))


@pytest.mark.parametrize(
    ("value", "right"), [(1.25, True), (0.75, True), (1.2500001, False), (0.7499999, False), (math.nan, False)]
)
def test_memory_that_is_computed_may_be_off_by_its_limit_and_no_more(value: float, right: bool) -> None:
    seen = computed(OWN, value)
    assert pool_is_right(seen, PAGE) is right
    findings = writes_own_kv(seen, SCHEDULE.case)
    assert [each.headline for each in findings] == [
        "KV memory is wrong after the step: a slot of this step's tokens does not hold their K and V"
    ] * (not right)
    assert all(each.where.startswith(f"layer 0, V, slot {OWN} ") for each in findings)


def test_memory_that_is_not_computed_is_compared_in_bits_where_the_rest_has_a_limit() -> None:
    foreign = next(slot for slot in range(PAGE, LAST) if slot not in OWNED)
    for slot in (foreign, int(SCHEDULE.steps[0].requests[0].slots[0])):
        seen = computed(slot, 0.125)
        assert not pool_is_right(seen, PAGE)
        (finding,) = writes_own_kv(seen, SCHEDULE.case)
        assert f"slot {slot} " in finding.where


def test_memory_that_is_no_slots_is_not_written_either() -> None:
    right = observation(SCHEDULE, expected_zeros(SCHEDULE))
    assert right.outside == ()
    assert pool_is_right(right, PAGE)
    slots, rows = right.written

    def with_outside(*places: int) -> Observation:
        pieces = [("pool", "slots", slots), ("pool", "rows", rows), ("pool", "outside", torch.tensor(places).long())]
        return replace(right, copies=copies_of(pieces))  # type: ignore[arg-type]

    assert pool_is_right(with_outside(), PAGE)
    seen = with_outside(4096, 12)
    assert not pool_is_right(seen, PAGE)
    (finding,) = writes_own_kv(seen, SCHEDULE.case)
    assert "memory between slots of the pool was written" in finding.headline
    assert finding.where.startswith("byte 4096 ")
    rows[0, 0, 0] += 1
    (finding,) = writes_own_kv(with_outside(4096), SCHEDULE.case)
    assert "does not hold their K and V" in finding.headline, "whose slot is wrong says more"


def test_a_slot_that_should_have_been_written_and_was_not_is_wrong() -> None:
    pool = empty_pool(SCHEDULE)
    pool[:, :, int(SCHEDULE.steps[0].requests[0].slots[-1])] = torch.nan
    assert writes_own_kv(observation(SCHEDULE, expected_zeros(SCHEDULE), pool=pool), SCHEDULE.case)


def test_whose_slot_is_wrong_is_said() -> None:
    request = SCHEDULE.steps[0].requests[1]
    unowned = next(slot for slot in range(PAGE, LAST) if slot not in OWNED)
    for slot, headline, spread in (
        (int(request.slots[request.prefix]), "a slot of this step's tokens", "1 of this step's tokens"),
        (int(request.slots[request.prefix - 1]), "a slot of an earlier token was overwritten", "1 of earlier tokens"),
        (unowned, "a slot that no live request owns was written", "1 unowned"),
    ):
        seen = observation(SCHEDULE, expected_zeros(SCHEDULE), pool=written(slot))
        (finding,) = writes_own_kv(seen, SCHEDULE.case)
        assert headline in finding.headline
        assert finding.spread == f"slots that are wrong: {spread}"


def test_an_input_is_modified_by_a_single_bit_and_not_by_holding_nan() -> None:
    expected, kept = expected_zeros(SCHEDULE), torch.full((3,), torch.nan)
    zero, minus = torch.zeros(3), torch.tensor([0.0, 0.0, -0.0])
    seen = observation(SCHEDULE, expected, inputs=(("q", kept, kept.clone()), ("seq_lens", zero, minus)))
    (finding,) = inputs_unchanged(seen)
    assert finding.where == "seq_lens"
    assert inputs_unchanged(observation(SCHEDULE, expected, inputs=(("q", kept, kept.clone()),))) == []


@pytest.mark.parametrize(
    ("piece", "name"),
    [
        ("q 0", "q of layer 0"),
        ("k 1", "k of layer 1"),
        ("v 1", "v of layer 1"),
        ("packed 0", "the tensor that holds q, k and v"),
    ],
)
def test_what_the_model_gave_is_compared_by_layer_and_named(piece: str, name: str) -> None:
    expected = expected_zeros(SCHEDULE)
    seen, data = observation(SCHEDULE, expected), expected.data
    assert seen.inputs is not None
    packed = torch.arange(6.0).view(3, 2)
    given = {f"{kind} {layer}": getattr(data, kind)[layer] for kind in "qkv" for layer in (0, 1)} | {"packed 0": packed}
    rest = [(g, n, t) for g, named in seen.copies.cut().items() for n, t in named.items()]

    def modified(now: dict[str, torch.Tensor]) -> tuple[str, ...]:
        copies = copies_of([*rest, *(("activations", *each) for each in now.items())])  # type: ignore[list-item]
        return replace(seen, copies=copies, inputs=replace(seen.inputs, packed=packed)).modified

    changed = given[piece].clone()
    changed.flatten()[-1] += 1
    assert modified(given) == ()
    assert modified(given | {piece: changed}) == (name,)
    assert modified({key: value for key, value in given.items() if key == "q 1"}) == (), "q, k, v may be views"


def test_damage_to_freed_memory_is_reported() -> None:
    expected = expected_zeros(SCHEDULE)
    assert addresses_stable(observation(SCHEDULE, expected)) == []
    assert addresses_stable(observation(SCHEDULE, expected, damaged=("a block",)))[0].where == "a block"


def evaluated_writes(slots: list[int], value: float) -> bool:
    """A step that is to write 1 into two slots, and writes ``value`` into ``slots``."""
    seen = observation(SCHEDULE, expected_zeros(SCHEDULE))
    assert seen.inputs is not None
    given = replace(seen.inputs, new_slots=torch.tensor([PAGE, PAGE + 1]), new_rows=torch.ones(2, 2, 2, 1, 2))
    rows = torch.full((2, 2, len(slots), 1, 2), value).view(torch.int32)
    copies = copies_of([("pool", "slots", torch.tensor(slots)), ("pool", "rows", rows)])
    return pool_is_right(replace(seen, inputs=given, copies=copies), PAGE)


def test_the_slots_of_the_step_are_written_all_of_them_and_with_their_numbers() -> None:
    assert evaluated_writes([PAGE, PAGE + 1], 1.0)
    assert evaluated_writes([0, PAGE, PAGE + 1], 1.0), "padding may write page 0"
    assert not evaluated_writes([PAGE], 1.0)
    assert not evaluated_writes([PAGE, PAGE + 1, PAGE + 2], 1.0)
    assert not evaluated_writes([PAGE, PAGE + 1], 1.5)


@pytest.mark.parametrize(("rows", "named"), [([], None), ([True, True], None), ([True, False, False], "rows 1, 2")])
def test_each_output_row_of_no_request_has_to_be_finite(rows: list[bool], named: str | None) -> None:
    seen = observation(SCHEDULE, expected_zeros(SCHEDULE))
    all_finite = torch.ones(len(rows), dtype=torch.bool)
    pieces = [(g, n, t) for g, found in seen.copies.cut().items() for n, t in found.items()]
    pieces += [("padding", "0", all_finite), ("padding", "1", torch.tensor(rows, dtype=torch.bool))]
    findings = padding_finite(replace(seen, copies=copies_of(pieces)))
    assert [finding.where for finding in findings] == ([f"layer 1, {named} of them"] if named else [])
    assert all(f"2 of {len(rows)} output rows" in finding.headline for finding in findings)
