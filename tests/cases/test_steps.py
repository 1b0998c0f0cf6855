"""The steps of a schedule, number by number: lengths, buckets, slots, pages, and the sizes of everything."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.plans import context_len
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.steps.schedule import PADDED_TOKENS, Request, Schedule, Step, make_schedule

EVERY = [case for mode in ForwardMode for case in generate(TorchNativeBackend.capabilities, mode, "core")]
CORE = [case for case in EVERY if not case.variants]
V1 = "draft-extend-mha2-d64-bf16-p16-k50.20.5-n4a1.3.2-shuffled-gauss-b4{}"


def decode(lens: str, bucket: int, page: int = 16, layout: str = "shuffled", padding: str = "prod") -> Schedule:
    return make_schedule(parse_case(f"decode-mha2-d64-bf16-p{page}-k{lens}-{layout}-gauss-b{bucket}{padding}"))


def prefixes(step: Step) -> list[int]:
    return [request.prefix for request in step.requests]


def every_step(schedule: Schedule) -> tuple[Step, ...]:
    return (*schedule.steps, schedule.second, schedule.oversized)


def keys_at_most(case: Case) -> Callable[[Request], int]:
    """Columns of a request's row of the table: its keys; where accepted counts decide, as many as there may be."""
    if case.draft:
        return lambda request: len(request.table_slots)
    return lambda request: request.prefix + (request.new if case.mode is ForwardMode.EXTEND else case.width)


def pages_of(step: Step, page: int) -> list[list[int]]:
    return [(request.slots[::page] // page).tolist() for request in step.requests]


def test_the_lengths_of_every_step() -> None:
    schedule = decode("50.20.5", 4)
    steps = schedule.steps
    assert schedule.buckets == (4, 2)
    assert [step.bucket for step in steps[:9]] == [4, 4, 4, 2, 4, 4, 4, 4, 2]
    assert [prefixes(step) for step in (*steps[:7], steps[8])] == [
        [50, 20, 5],
        [69, 39, 24, 69],
        [15],
        [26, 11],
        [5, 20, 50],
        [5, 20, 50],
        [20, 50, 5],
        [51],
    ]
    assert prefixes(schedule.oversized) == [18, 8, 3, 18, 8, 3]
    assert steps[7].bs == 3
    assert [step.eager_too for step in steps] == [index in (4, 7) for index in range(10)]


def test_long_beside_short_reaches_from_nothing_to_two_pages_more() -> None:
    case = parse_case("decode-mha2-d64-bf16-p4-k3x8-shuffled-gauss-b8prod")
    steps = [make_schedule(case.with_seed(seed)).steps[6] for seed in range(40)]
    assert {step.label for step in steps} == {"long and short"}
    lens = {length for step in steps for length in prefixes(step)}
    assert lens == set(range(3 + 2 * 4 + 2))


@pytest.mark.parametrize(("bucket", "buckets"), [(1, (2, 1)), (2, (2, 1)), (3, (3, 1)), (7, (7, 3))])
def test_buckets_are_the_cases_own_and_half_of_it_largest_first(bucket: int, buckets: tuple[int, ...]) -> None:
    schedule = decode("9", bucket)
    assert schedule.buckets == buckets
    assert schedule.max_bs == buckets[0]
    assert schedule.oversized.bs == bucket + 2


@pytest.mark.parametrize(
    ("own", "longer", "short"), [(0, 19, 0), (1, 20, 0), (15, 34, 14), (16, 35, 15), (99, 118, 15)]
)
def test_one_short_request_does_not_fill_its_first_page(own: int, longer: int, short: int) -> None:
    steps = decode(str(own), 1).steps
    assert (prefixes(steps[1]), prefixes(steps[2])) == ([longer], [short])


def test_steps_beside_the_own_batch_hold_512_prefix_tokens_at_most() -> None:
    assert prefixes(decode("493", 1).steps[1]) == [512]
    assert prefixes(decode("494", 1).steps[1])[0] <= 32
    assert prefixes(decode("237x2", 2).steps[1]) == [256, 256]
    first, second = prefixes(decode("237.238", 2).steps[1])
    assert first == 256
    assert second <= 32
    own = ("own batch", "own batch, elsewhere", "same lengths, other requests", "lengths in another order")
    for schedule in map(make_schedule, CORE):
        steps = [step for step in (*schedule.steps, schedule.oversized) if step not in schedule.chunks]
        most = [sum(each.decoder_prefix for each in step.requests) for step in steps if step.label not in own]
        # Padding that is not padding at all is filled with requests of 0 to 2.
        assert max(most) <= 512 + (2 * schedule.max_bs if schedule.case.padding == "small" else 0)


def test_a_length_in_place_of_one_that_is_too_long_is_anything_up_to_two_pages() -> None:
    case = parse_case("decode-mha2-d64-bf16-p4-k600-shuffled-gauss-b1prod")
    lens = {prefixes(make_schedule(case.with_seed(seed)).steps[1])[0] for seed in range(120)}
    assert lens == set(range(9))


def test_small_padding_fills_every_replay_with_requests_of_two_keys_at_most() -> None:
    extra = set()
    for seed in range(9):
        schedule = make_schedule(parse_case(V1.format("small")).with_seed(seed))
        for step in schedule.steps:
            assert step.bs == step.bucket
        extra |= set(prefixes(schedule.steps[0])[3:]) | set(prefixes(schedule.steps[2])[1:])
        assert [request.accepted for request in schedule.steps[0].requests] == [1, 3, 2, 1]
    assert extra == {0, 1, 2}


def test_in_one_replay_all_requests_accept_all_and_in_others_any_number() -> None:
    for case in (case for case in CORE if case.mode.is_draft_extend(include_v2=True)):
        schedule = make_schedule(case)
        counts = [[request.accepted for request in step.requests] for step in schedule.steps]
        most = schedule.spec_steps + 1
        assert counts[0][: case.bs] == list(case.new)
        assert set(counts[1]) == {most}
        assert all(1 <= count <= most for step in counts for count in step)
        ragged = case.mode is ForwardMode.DRAFT_EXTEND
        for step in every_step(schedule):
            assert [r.new for r in step.requests] == [r.accepted if ragged else case.width for r in step.requests]


def test_every_number_of_accepted_tokens_is_met() -> None:
    case = parse_case(V1.format("prod"))
    counts = {r.accepted for seed in range(9) for r in make_schedule(case.with_seed(seed)).steps[7].requests}
    assert counts == {1, 2, 3, 4}


def test_the_first_request_has_the_cases_tree_and_all_others_have_their_own_of_the_same_size() -> None:
    case = parse_case("target-verify-mha2-d64-bf16-p16-k50.20.5-t0.0.1.1.3-shuffled-gauss-b4prod")
    schedule = make_schedule(case)
    assert schedule.spec_steps == 3
    first = [request.tree for request in schedule.steps[0].requests]
    assert first[0] == case.tree
    assert len(set(first)) == 3, "a row of the mask of another request is wrong"
    others = [tree for tree in first[1:] if tree]
    assert {len(tree) for tree in others} == {6}
    others = [request.tree for step in schedule.steps[1:] for request in step.requests]
    assert len(set(others)) > 5
    assert {len(tree) for tree in others if tree} == {6}
    assert max(tree.topk for tree in others if tree) == 2
    assert max(tree.depth for tree in others if tree) == 3
    chains = make_schedule(parse_case("target-verify-mha2-d64-bf16-p16-k50.20.5-chain4-shuffled-gauss-b4prod"))
    assert {tree.parents for step in chains.steps for r in step.requests if (tree := r.tree)} == {(0, 1, 2)}
    assert (chains.spec_steps, decode("5", 1).spec_steps) == (3, 0)


def test_the_sizes_are_those_of_the_largest_batch() -> None:
    schedule = make_schedule(
        parse_case("draft-extend-v2-mha2-d64-bf16-p16-k50.20.5-n4a1.3.4-shuffled-gauss-b4prod")
    )  # fmt: skip
    assert (schedule.max_bs, schedule.max_tokens) == (4, 16)
    assert (schedule.most_requests, schedule.most_tokens) == (6, 24)
    lone = make_schedule(parse_case("draft-extend-v2-mha2-d64-bf16-p16-k5-n4a4-shuffled-gauss-b1prod"))
    assert (lone.max_bs, lone.max_tokens, lone.most_requests, lone.most_tokens) == (2, 8, 3, 12)
    step = lone.steps[0]
    assert (step.bs, step.tokens, step.lens) == (1, 4, [9])


def test_rows_of_no_request_behind_a_plan_are_rows_of_the_largest_forward() -> None:
    case = parse_case("extend-gqa4x2-d64-bf16-p16-k15.16.17-n7a17.1.2-shuffled-gauss-b4prod-padded_tokens")
    plain = make_schedule(case.with_changes(variants=frozenset()))
    assert make_schedule(case).most_tokens == plain.most_tokens + PADDED_TOKENS


@pytest.mark.parametrize("mode", list(ForwardMode), ids=str)
def test_a_full_context_is_filled_to_its_last_token_and_a_roomy_one_is_whole_pages(mode: ForwardMode) -> None:
    for case in (case for case in CORE if case.mode is mode):
        schedule, page = make_schedule(case), case.page_size
        assert schedule.max_context_len == context_len(case)
        # In draft-extend v1 the longest request need not be one that accepts all.
        # The second eager step of encoders has other requests' encoders before the same decoder lengths.
        ordinary = every_step(schedule) if case.encoder_len else schedule.steps
        steps = (*ordinary, schedule.oversized)
        longest = max(max(map(keys_at_most(case), step.requests), default=0) for step in steps)
        if case.mode not in (ForwardMode.EXTEND, ForwardMode.DRAFT_DECODE):
            assert longest == max(prefix for step in steps for prefix in prefixes(step)) + case.width
        room = schedule.max_context_len - longest
        if case.derived("context-room"):
            assert room == 0
        else:
            assert page < room <= 2 * page
            assert schedule.max_context_len % page == 0


def test_a_request_fills_the_context_in_every_mode() -> None:
    for mode in ForwardMode:
        full = [make_schedule(case) for case in CORE if case.mode is mode and case.derived("context-room")]
        lens = [
            (max(len(r.table_slots) for step in schedule.steps for r in step.requests), schedule.max_context_len)
            for schedule in full
        ]
        assert sum(length == context for length, context in lens) > 5, mode
        assert any(context % schedule.case.page_size for schedule, (_, context) in zip(full, lens, strict=True)), mode


@pytest.mark.parametrize("mode", list(ForwardMode), ids=str)
def test_pages_rows_and_tables_are_enough_and_no_more(mode: ForwardMode) -> None:
    for case in (case for case in CORE if case.mode is mode):
        schedule, page = make_schedule(case), case.page_size
        steps = (*schedule.steps, schedule.oversized)
        # Keys of the decoder begin a page, behind those of the encoder.
        needs = [
            sum(-(-(keys_at_most(case)(r) - r.encoder_len) // page) - (-r.encoder_len // page) for r in step.requests)
            for step in steps
        ]
        assert schedule.num_pages == max(needs) + max(3, max(needs) // 4)
        assert schedule.pool_rows == schedule.oversized.bs + 3
        for step in every_step(schedule):
            rows = [request.pool_row for request in step.requests]
            assert len(set(rows)) == len(rows)
            assert min(rows) >= 1
            assert max(rows) <= schedule.pool_rows
            assert step.req_to_token.shape == (schedule.pool_rows + 1, schedule.max_context_len)
            assert step.req_to_token.dtype == np.int32
            assert step.req_to_token[1:].min() >= 1
            assert step.req_to_token.max() < (schedule.num_pages + 1) * page
            for request in step.requests:
                assert np.array_equal(
                    step.req_to_token[request.pool_row, : len(request.table_slots)], request.table_slots
                )


@pytest.mark.parametrize("layout", ["contiguous", "shuffled", "interleaved", "reversed"])
def test_the_first_and_the_last_page_of_the_pool_are_used(layout: str) -> None:
    """Slot numbers up to the pool's last, and page 1, which follows the reserved one."""
    used = set()
    for seed in range(60):
        schedule = make_schedule(parse_case(f"decode-mha2-d64-bf16-p4-k9.2-{layout}-gauss-b2prod-s{seed + 1}"))
        for step in schedule.steps:
            used |= {page for mine in pages_of(step, 4) for page in mine}
    assert used == set(range(1, schedule.num_pages + 1))


def test_layouts_page_by_page() -> None:
    def of(layout: str) -> list[list[int]]:
        found = pages_of(decode("40.3.20", 3, layout=layout).steps[0], 16)
        low = min(min(pages) for pages in found)
        return [[page - low for page in pages] for pages in found]

    assert of("contiguous") == [[0, 1, 2], [3], [4, 5]]
    assert of("reversed") == [[2, 1, 0], [3], [5, 4]]
    assert of("interleaved") == [[0, 3, 5], [1], [2, 4]]


@pytest.mark.parametrize(
    ("lens", "page", "late", "early"),
    [
        ("9.6.5", 1, [6, 6, 5], [3, 3, 3]),
        ("50.20.5", 16, [16, 16, 0], [16, 16, 0]),
        ("50.40.16", 16, [32, 32, 16], [16, 16, 16]),
        ("50", 16, [48], [32]),
        ("3.15", 16, [0, 0], [0, 0]),
    ],
)
def test_shared_prefixes_part_late_or_early(lens: str, page: int, late: list[int], early: list[int]) -> None:
    bucket = len(lens.split("."))
    case = parse_case(f"decode-mha2-d64-bf16-p{page}-k{lens}-shared-gauss-b{bucket}prod")
    for seed in range(8):
        seeded = case.with_seed(seed)
        step = make_schedule(seeded).steps[0]
        assert [request.shared for request in step.requests] == (early if seeded.derived("shared-prefixes") else late)
    assert {case.with_seed(seed).derived("shared-prefixes") for seed in range(8)} == {0, 1}


def test_a_cached_prefix_lies_where_it_lay_in_earlier_steps_and_the_rest_does_not() -> None:
    schedule = decode("50.40.36", 3, layout="shared")
    first, later = schedule.steps[0].requests[0], schedule.steps[1].requests[0]
    both = min(first.shared, later.shared)
    assert both >= 16
    assert np.array_equal(first.slots[:both], later.slots[:both])
    rests = [set((r.slots[r.shared :] // 16).tolist()) for r in (first, later)]
    cached = set((first.slots[: first.shared] // 16).tolist())
    assert rests[0].isdisjoint(cached)
    assert any(
        set((s.requests[0].slots[s.requests[0].shared :] // 16).tolist()) != rests[0] for s in schedule.steps[1:]
    )


def test_lengths_in_another_order_take_their_accepted_counts_along() -> None:
    elsewhere, same, other = make_schedule(parse_case(V1.format("prod"))).steps[4:7]
    counts = [[request.accepted for request in step.requests] for step in (elsewhere, same, other)]
    assert counts[0] == counts[1]
    assert counts[2] == counts[1][1:] + counts[1][:1]


def test_equal_lengths_have_no_other_order() -> None:
    assert len(decode("7x2", 3).steps) == 9
    assert len(decode("7.8", 3).steps) == 10
    labels = [step.label for step in decode("7x2", 3).steps]
    assert labels.count("same lengths, other requests") == 1
