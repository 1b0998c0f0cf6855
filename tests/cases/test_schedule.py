import numpy as np
import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, Heads, parse_case
from attn_testkit.cases.rows import Decode
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.steps.data import make_layers, make_step_data, pool_image
from attn_testkit.steps.schedule import make_schedule, only

CASES = [
    case
    for mode in ForwardMode
    for case in generate(TorchNativeBackend.capabilities, mode, "smoke")
    if not case.encoder_len and not case.layers.shapes and not case.variants & {"empty_batches", "narrower_widths"}
]
"""Smoke, without encoders, steps that have no request, and heads or widths that differ."""
DECODE = "decode-gqa4x2-d64-bf16-p16-k15.16.17-{layout}-gauss-b4prod"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_live_requests_share_no_slot_but_those_of_common_prefix_pages_and_page_0_is_unowned(case: Case) -> None:
    schedule = make_schedule(case)
    for step in (*schedule.steps, schedule.oversized):
        slots = np.concatenate([r.slots for r in step.requests])
        common = max(r.shared for r in step.requests)
        assert common == 0 or case.layout == "shared"
        assert len(np.unique(slots)) == len(slots) - sum(r.shared for r in step.requests) + common
        assert slots.min() >= case.page_size
        assert slots.max() < (schedule.num_pages + 1) * case.page_size
        for request in step.requests:
            assert len(request.slots) == request.prefix + request.new
            table = request.table_slots
            whole = table[: len(table) // case.page_size * case.page_size].reshape(-1, case.page_size)
            assert (np.diff(whole, axis=1) == 1).all(), "slots inside a page are consecutive"
            assert (whole[:, 0] % case.page_size == 0).all(), "pages are aligned"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_a_schedule_has_eight_replays_that_differ_in_every_field(case: Case) -> None:
    steps = make_schedule(case).steps
    assert len(steps) >= 8
    assert len({step.bucket for step in steps}) == 2
    assert case.padding == "small" or any(step.bs < step.bucket for step in steps)
    assert any(step.bs == step.bucket for step in steps)
    first, again = steps[0], next(step for step in steps if step.label == "own batch, elsewhere")
    own = [r.prefix for r in first.requests[: case.bs]]
    assert own == [r.prefix for r in again.requests[: case.bs]][::-1]
    assert not np.array_equal(first.req_to_token, again.req_to_token)
    tables = [step.req_to_token.tobytes() for step in steps]
    assert len(set(tables)) == len(tables)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_every_step_is_found_again_by_its_name(case: Case) -> None:
    schedule = make_schedule(case)
    steps = (*schedule.steps, schedule.second, schedule.oversized)
    assert [step.name for step in schedule.steps] == [f"step {index}" for index in range(len(schedule.steps))]
    assert (schedule.second.name, schedule.oversized.name) == ("second", "oversized")
    every = [*steps, *(only(step, index) for step in steps for index in range(step.bs))]
    assert len({step.name for step in every}) == len(every)
    assert only(schedule.second, 0).name == "second, only request 0"
    for step in every:
        assert schedule.step_named(step.name) is step


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("step 99", "has no step 'step 99'; it has 'step 0', 'step 1', .*'second', 'oversized'"),
        ("third, only request 0", "has no step 'third'"),
        ("step 0, only request 3", "'step 0' has 3 requests, and none of number 3"),
    ],
)
def test_a_step_that_is_not_there_is_a_key_error_with_the_names_there_are(name: str, message: str) -> None:
    schedule = make_schedule(parse_case(DECODE.format(layout="shuffled")))
    with pytest.raises(KeyError, match=message):
        schedule.step_named(name)


def test_layouts_are_what_they_say() -> None:
    slots = {}
    for layout in ("contiguous", "shuffled", "interleaved", "reversed"):
        steps = make_schedule(parse_case(DECODE.format(layout=layout))).steps
        slots[layout] = [r.slots // 16 for r in steps[1].requests]
    assert all((np.diff(pages) >= 0).all() for pages in slots["contiguous"])
    assert any((np.diff(pages) < 0).any() for pages in slots["reversed"])
    pages = slots["interleaved"]
    spans = [
        set(range(int(mine.min()), int(mine.max()) + 1))
        & {int(x) for other in pages if other is not mine for x in other}
        for mine in pages
    ]
    assert any(spans), "pages of different requests alternate"


def test_requests_share_the_whole_pages_that_their_prefixes_have_in_common() -> None:
    schedule = make_schedule(parse_case("decode-mha2-d64-bf16-p16-k50.20.5-shared-gauss-b4prod"))
    step = schedule.steps[0]
    assert [request.shared for request in step.requests] == [16, 16, 0]
    first, second, _ = step.requests
    assert (first.slots[:16] == second.slots[:16]).all()
    assert not set(first.slots[16:]) & set(second.slots[16:])
    data = make_step_data(schedule, step)
    assert torch.equal(data.keys[:, 0, :16], data.keys[:, 1, :16])
    assert not torch.equal(data.keys[:, 0, 16:21], data.keys[:, 1, 16:21])
    probe = make_step_data(schedule, step, "probe.1.0")
    assert probe.values[0, 1, :16].any(), "the request that is asked decides what shared slots hold"
    assert torch.equal(probe.values[:, 0, :16], probe.values[:, 1, :16])


@pytest.mark.parametrize("mode", ForwardMode)
def test_neighbouring_replays_of_a_bucket_have_the_same_lengths_and_then_the_same_in_another_order(
    mode: ForwardMode,
) -> None:
    words = {"decode": "", "target-verify": "t0.0.1-", "draft-decode": "topk2steps3-"}.get(mode.value, "n4a1.3.2-")
    steps = make_schedule(parse_case(f"{mode.value}-mha2-d64-bf16-p16-k50.20.5-{words}shuffled-gauss-b4prod")).steps
    elsewhere, same, rotated = steps[4:7]
    lens = [[request.prefix + request.new for request in step.requests] for step in (elsewhere, same, rotated)]
    assert lens[0] == lens[1]
    assert lens[2] == lens[1][1:] + lens[1][:1] != lens[1]
    for a, b in zip(elsewhere.requests, same.requests, strict=True):
        assert not np.array_equal(a.slots, b.slots)
    assert len({step.bucket for step in (elsewhere, same, rotated)}) == 1


def test_contexts_are_filled_to_the_last_token_in_some_cases_and_roomy_in_the_others() -> None:
    schedules = [make_schedule(case) for case in generate(TorchNativeBackend.capabilities, ForwardMode.DECODE, "core")]
    full = [
        s
        for s in schedules
        if max(len(r.slots) for x in (*s.steps, s.oversized) for r in x.requests) == s.max_context_len
    ]
    assert 5 < len(full) < len(schedules) - 5
    assert any(s.max_context_len % s.case.page_size for s in full), "a context need not be whole pages"


def test_an_eager_batch_is_larger_than_any_graph_and_the_second_eager_step_is_sometimes_stored_already() -> None:
    schedules = [make_schedule(case) for case in CASES]
    for schedule in schedules:
        assert schedule.oversized.bs > schedule.max_bs
        assert schedule.second.index > 0
    assert {schedule.second.stored for schedule in schedules} == {True, False}
    assert len({schedule.second.label for schedule in schedules}) > 4


@pytest.mark.parametrize("mode", list(ForwardMode))
def test_the_second_eager_step_is_alike_in_lengths_alone_in_some_cases(mode: ForwardMode) -> None:
    alike = other_slots = other_trees = 0
    cases = list(generate(TorchNativeBackend.capabilities, mode, "core"))
    for schedule in map(make_schedule, cases):
        first, second = schedule.steps[0].requests, schedule.second.requests
        if [len(r.slots) for r in first] == [len(r.slots) for r in second]:
            alike += 1
            other_trees += [r.tree for r in first] != [r.tree for r in second]
            other_slots += any(not np.array_equal(a.slots, b.slots) for a, b in zip(first, second, strict=True))
    assert other_slots > 0.9 * alike
    assert len(cases) / 5 < alike < len(cases) / 2
    assert mode is not ForwardMode.TARGET_VERIFY or other_trees > 5


def test_window_and_soft_cap_meet_in_one_layer_and_lie_in_different_ones() -> None:
    cases = generate(TorchNativeBackend.capabilities, ForwardMode.DECODE, "core")
    seen = set()
    for case in cases:
        if case.window >= 0 and case.logit_cap:
            layers = make_layers(case)[:2]
            seen.add(tuple((layer.sliding_window_size >= 0, layer.logit_cap > 0) for layer in layers))
    assert {((True, True), (False, False)), ((True, False), (False, True)), ((False, False), (True, True))} <= seen
    assert any(all(a) for a, _ in seen)
    assert any(a[0] and b[0] for a, b in seen), "both layers have a window"


def test_the_table_beyond_a_request_holds_slots_of_others() -> None:
    step = make_schedule(parse_case(DECODE.format(layout="shuffled"))).steps[0]
    for request in step.requests:
        tail = step.req_to_token[request.pool_row, len(request.slots) :]
        assert len(tail) > 0
        assert (tail > 0).all()
    assert (step.req_to_token[0] == 0).all()


def test_draft_extend_v1_is_ragged_and_v2_is_not() -> None:
    v1 = make_schedule(parse_case("draft-extend-mha2-d64-bf16-p16-k5.9-n4a1.3-shuffled-gauss-b2prod"))
    v2 = make_schedule(parse_case("draft-extend-v2-mha2-d64-bf16-p16-k5.9-n4a1.3-shuffled-gauss-b2prod"))
    assert [r.new for r in v1.steps[0].requests] == [1, 3]
    assert [r.new for r in v2.steps[0].requests] == [4, 4]
    assert [r.accepted for r in v2.steps[0].requests] == [1, 3]
    assert any(len({r.new for r in step.requests}) > 1 for step in v1.steps[2:])


def test_draft_extend_v2_has_more_rows_than_the_longest_path_in_some_cases_and_never_accepts_more() -> None:
    cases = generate(TorchNativeBackend.capabilities, ForwardMode.DRAFT_EXTEND_V2, "core")
    shallow = [make_schedule(case) for case in cases if make_schedule(case).spec_steps + 1 < case.width]
    assert 5 < len(shallow) < len(cases) - 5
    for schedule in shallow:
        counts = [request.accepted for step in schedule.steps for request in step.requests]
        assert max(counts) == schedule.spec_steps + 1


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_the_pool_holds_nan_wherever_no_request_lives(case: Case) -> None:
    schedule = make_schedule(case)
    step = schedule.steps[0]
    data = make_step_data(schedule, step)
    before, after = (pool_image(schedule, step, data, False, after=after) for after in (False, True))
    owned = torch.zeros(before.shape[2], dtype=torch.bool)
    new = torch.zeros_like(owned)
    for request in step.requests:
        owned[torch.from_numpy(request.slots[: request.prefix])] = True
        owned[torch.from_numpy(request.copies).flatten()] = True
        new[torch.from_numpy(request.slots[request.prefix :])] = True
    assert before[:, :, ~owned].float().isnan().all()
    assert not before[:, :, owned].float().isnan().any()
    assert not after[:, :, owned | new].float().isnan().any()
    old = ~new[:, None, None]
    assert torch.equal((after.float().nan_to_num(7) * old), (before.float().nan_to_num(7) * old))


def test_finite_tails_hold_numbers_in_the_last_page_alone() -> None:
    schedule = make_schedule(parse_case(DECODE.format(layout="shuffled")))
    step = schedule.steps[0]
    before = pool_image(schedule, step, make_step_data(schedule, step), True, after=False)
    last = step.requests[0].slots[-1]
    assert len(step.requests[0].slots) == 16, "this request fills its page; its neighbour does not"
    tail = int(step.requests[1].slots[-1]) + 1
    assert before[0, 0, tail].isfinite().all()
    assert before[0, 0, :16].isnan().all()
    assert last // 16 != tail // 16


def test_a_request_alone_has_the_numbers_it_has_in_the_batch() -> None:
    schedule = make_schedule(parse_case("draft-extend-mha2-d64-bf16-p16-k5.9-n4a1.3-shuffled-gauss-b2prod"))
    step = schedule.steps[0]
    whole, alone = make_step_data(schedule, step), make_step_data(schedule, only(step, 1))
    assert torch.equal(whole.q[:, 1:4], alone.q)
    assert torch.equal(whole.keys[:, 1:, :12], alone.keys)
    assert torch.equal(whole.out_cache_loc[1:4], alone.out_cache_loc)


def test_footprint_values_name_one_key_a_channel() -> None:
    schedule = make_schedule(Case(Decode(), Heads("mha", 2, 2), 64, "fp16", 16, (4096,), data="one_hot", bucket=1))
    data = make_step_data(schedule, schedule.steps[0])
    values = data.values[0, 0]
    assert values.sum(0).eq(1).all(), "every channel carries exactly one key"
    assert values[-1].sum() == 2, "the last key is watched in both heads"
    assert values[0].sum() == 2, "and the first"
