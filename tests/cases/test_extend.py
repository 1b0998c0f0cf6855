"""Extend: new tokens of every step, chunks that follow each other, and what each needs of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, Heads, parse_case
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.cases.extend import NEW_TOKENS, chunks_of, new_tokens
from attn_testkit.cases.plans import context_len
from attn_testkit.cases.rows import Extend, room_for
from attn_testkit.catalogue.not_covered import describe_not_covered
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.steps.data import StepData, make_step_data, new_kv, pool_image
from attn_testkit.steps.schedule import Schedule, Step, make_schedule, only

EXTEND = ForwardMode.EXTEND
CHUNKED = "extend-gqa2x2-d32-bf16-p4-k0.5.9-n4a9.1.2-chunks3-{}-gauss-b4prod"


def core() -> Sequence[Case]:
    """Not at import: every process that collects tests would take the time."""
    return generate(TorchNativeBackend.capabilities, EXTEND, "core")


def rows(step: Step) -> list[int]:
    return [request.new for request in step.requests]


def prefixes(step: Step) -> list[int]:
    return [request.prefix for request in step.requests]


def declared(**changes: object) -> Capabilities:
    every: dict[str, object] = {
        "eager": {"extend"},
        "graph": {"extend"},
        "heads": {"gqa_ratios": {1}, "head_dims": {64}},
    }
    return Capabilities(**every).with_changes(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new": (3,)}, r"\(3,\): there must be one count per request, and there are 2"),
        ({"new": ()}, r"\(\): there must be one count per request"),
        ({"new": (0, 0)}, r"new tokens \(0, 0\) must be 0 or more per request, and at least one in total"),
        ({"new": (3, -1)}, r"new tokens \(3, -1\) must be 0 or more"),
        ({"new": (3, 4)}, "7 new tokens are more than the 2 x 3 rows of their graph"),
        ({"chunks": 0}, "0 chunks"),
    ],
)
def test_a_batch_that_no_server_makes_is_refused(changes: dict[str, object], message: str) -> None:
    minimal = Case(Extend((3, 3), 3), Heads("mha", 2, 2), 64, "bf16", 16, (5, 9), bucket=2)
    assert minimal.most_new == 3
    with pytest.raises(ValueError, match=message):
        replace(minimal, rows=replace(minimal.rows, **changes))  # type: ignore[arg-type]


def test_chunks_are_a_word_of_the_id_and_one_chunk_is_none() -> None:
    case = parse_case(CHUNKED.format("shared"))
    assert (case.new, case.width, case.chunks, case.most_new) == ((9, 1, 2), 4, 3, 9)
    assert parse_case(case.id) == case
    assert "chunks" not in parse_case(case.id.replace("-chunks3", "")).id


def test_the_page_of_modes_has_every_mode() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "modes.md").read_text()
    assert [mode for mode in ForwardMode if f"| `{mode.value}`" not in page] == []


def test_new_tokens_lie_on_both_sides_of_a_page_and_are_1_where_none_are_listed() -> None:
    assert new_tokens("ones", 3, 16, 99) == (1, 1, 1)
    assert new_tokens("below a page", 4, 16, 99) == (15, 16, 2, 1)
    assert new_tokens("a page", 3, 16, 99) == (16, 1, 17)
    assert new_tokens("above a page", 2, 16, 99) == (17, 15)
    assert new_tokens("pages", 2, 16, 99) == (35, 1)
    assert new_tokens("prompt first", 3, 16, 99) == (19, 1, 1)
    assert new_tokens("decodes first", 3, 16, 99) == (1, 1, 19)
    assert new_tokens("decodes first", 1, 16, 99) == (19,)
    assert new_tokens("a page", 3, 1, 99) == (8, 1, 9), "a page of one slot is no length of its own"


def test_new_tokens_are_as_many_as_are_declared_and_a_batch_is_no_more_than_costs_little() -> None:
    for name in NEW_TOKENS:
        for page in (1, 16, 128):
            assert sum(new_tokens(name, 7, page, 1 << 20)) <= 192 + 6
            assert max(new_tokens(name, 7, page, 5)) <= 5
    assert new_tokens("below a page", 3, 64, 999) == (63, 64, 2)
    assert new_tokens("below a page", 3, 96, 999) == (95, 96, 1)
    assert new_tokens("below a page", 3, 97, 999) == (96, 1, 2)


@pytest.mark.parametrize(("new", "room"), [((1,), 1), ((1, 1, 1), 1), ((4, 1), 3), ((5, 1), 3), ((9, 1, 1), 4)])
def test_a_graph_has_room_for_the_batch_and_for_no_request_more(new: tuple[int, ...], room: int) -> None:
    assert room_for(new) == room
    assert sum(new) in range(len(new) * (room - 1) + 1, len(new) * room + 1)


def test_core_meets_what_prefill_bugs_are_made_of() -> None:
    for case_has in (
        lambda c: any(p == 0 for p in c.prefixes),
        lambda c: any(0 < p < c.page_size for p in c.prefixes),
        lambda c: any((p + 1) % c.page_size == 0 and c.page_size > 1 for p in c.prefixes),
        lambda c: any(n > 1 and not (p + n) % c.page_size for p, n in zip(c.prefixes, c.new, strict=True))
        and c.page_size > 1,
        lambda c: set(c.new) == {1} and c.bs > 1,
        lambda c: c.new[0] == 1 and max(c.new) > c.page_size > 1,
        lambda c: c.new[-1] == 1 and max(c.new) > c.page_size > 1,
        lambda c: max(c.new) > 2 * c.page_size > 2,
        lambda c: {c.page_size - 1, c.page_size} <= set(c.new),
        lambda c: c.page_size + 1 in c.new,
        lambda c: c.layout == "shared" and c.chunks > 1,
        lambda c: c.multi_mode,
        lambda c: max(c.new) == 260,
        lambda c: c.bs == 132,
        lambda c: max(c.prefixes) == 66_000,
    ):  # fmt: skip
        assert any(case_has(case) for case in core())


def test_no_case_has_more_new_tokens_than_are_declared_and_one_has_so_many() -> None:
    for most in (1, 2, 7, 40, 400, 600):
        supported = declared(bounds={"max_extend_tokens": most, "max_q_rows": 3})
        cases = generate(supported, EXTEND, "core")
        every = [e for c in cases for e in (c, *(co_residents(c, {EXTEND}, 3, 1, most) if c.multi_mode else ()))]
        assert max(each.most_new for each in every) == min(most, 520)
        assert max(max(rows(step), default=0) for each in every for step in make_schedule(each).steps) == min(most, 520)
        left = describe_not_covered(supported, [EXTEND], cases)
        assert any("new tokens of a request" in words for words in left) == (most > 520)


def test_an_extend_beside_other_modes_keeps_within_both_capabilities() -> None:
    host = parse_case("extend-mha2-d64-bf16-p16-k5.9-n17a33.1-shuffled-gauss-b2prod-multi_mode")
    for most_rows, most_new, width, new in ((8, 99, 4, 4), (3, 99, 3, 3), (8, 2, 4, 2)):
        others = {other.mode: other for other in co_residents(host, set(ForwardMode), most_rows, 1, most_new)}
        assert others[ForwardMode.TARGET_VERIFY].width == width
        decode = parse_case("decode-mha2-d64-bf16-p16-k5.9-shuffled-gauss-b2prod-multi_mode")
        extend = next(o for o in co_residents(decode, set(ForwardMode), most_rows, 1, most_new) if o.mode is EXTEND)
        assert (extend.width, max(extend.new) <= new, extend.chunks) == (new, True, 1)


def test_every_step_fits_its_graph() -> None:
    for case in core():
        schedule = make_schedule(case)
        assert rows(schedule.steps[0])[: case.bs] == list(case.new), case.id
        for step in schedule.steps:
            assert min(rows(step), default=1) >= (0 not in case.new), case.id
            assert max(rows(step), default=0) <= case.most_new, case.id
            assert step.tokens <= step.bucket * case.width, case.id
        # A batch of many requests has fewer steps.
        exact = next((step for step in schedule.steps if step.label == "longer, exact"), None)
        assert rows(exact) == [case.width] * exact.bucket if exact else case.bucket > 64, case.id
        assert schedule.oversized.tokens <= schedule.most_tokens, case.id
        assert schedule.max_context_len == context_len(case), case.id
        assert schedule.spec_steps == 0, case.id


def test_other_steps_have_rows_that_decode_and_the_longest_prompts() -> None:
    case = parse_case("extend-mha2-d64-bf16-p16-k5x4-n9a33.1x3-shuffled-gauss-b4prod")
    drawn = [n for seed in range(20) for step in make_schedule(case.with_seed(seed)).steps[2:] for n in rows(step)]
    assert set(drawn) >= {1, 33}
    assert len(set(drawn)) > 20


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_the_next_chunk_has_as_many_rows_and_the_last_one_no_more(everyone: bool, last: int) -> None:
    case = parse_case(CHUNKED.format("shuffled"))
    seeded = map(case.with_seed, range(60))
    wanted = next(c for c in seeded if (c.derived("chunked-requests"), c.derived("last-chunk")) == (everyone, last))
    goes_on = (9, 1, 2) if everyone else (9, 1, 1)
    ends = {0: (1, 1, 1), 1: (5, 1, 1), 2: goes_on}[last]
    assert chunks_of(wanted, 3) == [(9, 1, 2), goes_on, ends]
    assert chunks_of(wanted, 4) == [(9, 1, 2, 1), (*goes_on, 1), (*ends, 1)]


def chunks(schedule: Schedule) -> list[Step]:
    return [schedule.steps[0], *schedule.chunks]


def test_a_chunk_has_the_keys_and_values_that_are_stored_by_then_and_no_later_ones() -> None:
    schedule = make_schedule(parse_case(CHUNKED.format("shared")))
    data = [make_step_data(schedule, step) for step in chunks(schedule)]
    for step, each in zip(chunks(schedule), data, strict=True):
        assert each.stored_values is not None
        assert each.stored_keys.shape[2] == each.stored_values.shape[2] == each.visible.shape[2] == max(step.lens)
        assert torch.equal(each.stored_values, data[-1].stored_values[:, :, : max(step.lens)])


@pytest.mark.parametrize("layout", ["contiguous", "shuffled", "interleaved", "reversed", "shared"])
def test_the_prefix_of_a_chunk_is_what_the_chunk_before_it_wrote(layout: str) -> None:
    for seed in range(4):
        schedule = make_schedule(parse_case(CHUNKED.format(layout)).with_seed(seed))
        steps = chunks(schedule)
        assert [step.label for step in steps] == ["own batch", "chunk 2 of 3", "chunk 3 of 3"]
        assert [step.name for step in steps] == ["step 0", "step 1", "step 2"]
        for before, after in pairwise(steps):
            assert prefixes(after) == before.lens
            for a, b in zip(before.requests, after.requests, strict=True):
                assert (a.pool_row, a.shared) == (b.pool_row, b.shared)
                assert np.array_equal(a.slots, b.slots[: len(a.slots)])
                assert np.array_equal(after.req_to_token[b.pool_row, : len(b.slots)], b.slots)
            left, had = (image(schedule, before, after=True), image(schedule, after, after=False))
            owned = np.concatenate([request.slots for request in before.requests])
            assert torch.equal(bits(left[:, :, owned]), bits(had[:, :, owned]))


def image(schedule: Schedule, step: Step, *, after: bool) -> torch.Tensor:
    return pool_image(schedule, step, make_step_data(schedule, step), False, after=after)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_chunk_has_its_rows_of_the_whole_and_every_row_comes_once() -> None:
    schedule = make_schedule(parse_case(CHUNKED.format("shuffled")))
    steps = chunks(schedule)
    whole = steps[0].chunk_of
    assert whole is not None
    all_rows = make_step_data(schedule, whole)
    found: list[tuple[int, int]] = []
    for step in steps:
        data = make_step_data(schedule, step)
        assert data.q.shape[1] == data.hidden.shape[0] == step.tokens
        slots, _ = new_kv(data)
        expected = np.concatenate([r.slots[r.prefix :] for r in step.requests])
        assert slots.tolist() == sorted(expected.tolist())
        assert data.out_cache_loc.tolist() == expected.tolist()
        assert data.visible.shape == (step.bs, max(rows(step)), max(step.lens))
        for row in range(step.tokens):
            request, position = int(data.row_request[row]), int(data.positions[row])
            found.append((request, position))
            at = (all_rows.row_request == request) & (all_rows.positions == position)
            for name in ("q", "k", "v"):
                assert torch.equal(getattr(data, name)[:, row], getattr(all_rows, name)[:, at][:, 0])
            assert torch.equal(data.hidden[row], all_rows.hidden[at][0])
            seen = data.visible[request, int(data.row_offset[row])]
            assert seen.nonzero().flatten().tolist() == list(range(position + 1))
    assert sorted(found) == sorted(zip(all_rows.row_request.tolist(), all_rows.positions.tolist(), strict=True))


def test_one_request_of_a_chunk_has_the_numbers_that_it_has_in_it() -> None:
    schedule = make_schedule(parse_case(CHUNKED.format("shared")))
    step = schedule.chunks[0]
    together = make_step_data(schedule, step)
    for index in range(step.bs):
        alone: StepData = make_step_data(schedule, only(step, index))
        mine = together.row_request == index
        assert torch.equal(alone.q, together.q[:, mine])
        assert torch.equal(alone.out_cache_loc, together.out_cache_loc[mine])


def test_a_case_in_one_chunk_has_no_others_and_neither_has_another_mode() -> None:
    assert make_schedule(parse_case(CHUNKED.format("shared").replace("-chunks3", ""))).chunks == ()
    assert make_schedule(parse_case("decode-mha2-d64-bf16-p16-k5-shuffled-gauss-b1prod")).chunks == ()
