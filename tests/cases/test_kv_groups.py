"""KV groups: where tokens lie in a second pool, what a windowed group lets go of, and which cases have groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.layers import Layers
from attn_testkit.catalogue.not_covered import not_covered
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.steps.data import held_kv, make_layers, make_step_data, pool_image, stored_kv
from attn_testkit.steps.kv_groups import group_of_place, outgrown, slot_in_pool, slot_map, table_of_group
from attn_testkit.steps.schedule import Schedule, make_schedule

CAPABILITIES = TorchNativeBackend.capabilities
DECODE = "decode-gqa2x2-d32-bf16-p4-k{keys}-{layout}-gauss{words}-layers3from5groups-b4prod"


def schedule_of(keys: str = "19.40.6", layout: str = "shuffled", words: str = "-w7") -> Schedule:
    return make_schedule(parse_case(DECODE.format(keys=keys, layout=layout, words=words)))


def windows_of(schedule: Schedule) -> tuple[int, ...]:
    return tuple(layer.sliding_window_size for layer in make_layers(schedule.case))


@pytest.mark.parametrize("mode", ForwardMode)
def test_cases_have_groups_where_they_are_declared_but_no_draft_has(mode: ForwardMode) -> None:
    def found(tier: str = "core", **declared: object) -> list[int]:
        cases = generate(CAPABILITIES.with_changes(**declared), mode, tier)
        groups = (case for case in cases if case.layers.groups and not case.layers.shapes and not case.encoder_len)
        return [case.window for case in groups]

    # Without a window, with one of the named cases, and with those of the array.
    assert set(found()) >= (set() if mode.is_draft_decode() else {-1, 7})
    assert len(set(found())) >= (0 if mode.is_draft_decode() else 3)
    assert bool(found()) is not mode.is_draft_decode()
    assert found(kv_pool={"kv_groups": False}) == found("smoke", kv_pool={"kv_groups": False}) == []
    assert ("KV groups", "KV groups") not in not_covered(CAPABILITIES, mode, generate(CAPABILITIES, mode, "core"))


def test_what_has_no_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="1 layer cannot have two KV groups"):
        Layers(1, 0, groups=True)
    with pytest.raises(ValueError, match="all layers of a draft share one KV group"):
        parse_case("draft-decode-mha2-d32-bf16-p4-k5-topk1steps3-shuffled-gauss-layers2from0groups-b2prod")


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        ("-lseprefix-b2prod", "KV splits and KV groups: "),
        ("-b2prod-given_out", ""),
        ("-b2prod-empty_batches-zero_length_padding", ""),
    ],
)
def test_groups_go_with_server_variants_and_not_with_parts(words: str, beside: str) -> None:
    minimal = "decode-mha2-d32-bf16-p4-k5-shuffled-gauss-layers3from5"
    assert parse_case(minimal + words).layers == Layers(3, 5)
    if not beside:
        assert parse_case(f"{minimal}groups{words}").layers.groups
        return
    with pytest.raises(ValueError, match=beside):
        parse_case(f"{minimal}groups{words}")


def test_a_second_pool_has_the_same_pages_elsewhere_and_page_0_at_its_place() -> None:
    schedule = schedule_of()
    first, second = slot_map(schedule, 0), slot_map(schedule, 1)
    assert np.array_equal(first, np.arange((schedule.num_pages + 1) * 4))
    assert np.array_equal(np.sort(second), first)
    assert second[:4].tolist() == [0, 1, 2, 3]
    assert np.array_equal(second % 4, first % 4), "a page stays whole"
    assert (second // 4 != first // 4).mean() > 0.8
    assert [group_of_place(schedule, place) for place in range(3)] == [0, 1, 0]
    assert [slot_in_pool(schedule, place, 9) for place in range(3)] == [9, second[9], 9]


@pytest.mark.parametrize(("window", "pages"), [(15, 1), (16, 0), (11, 2), (12, 1), (0, 4), (19, 0)])
def test_a_windowed_group_lets_go_of_whole_pages_that_no_row_sees(window: int, pages: int) -> None:
    """19 keys before the step: the first row sees those from 19 - W on, so a page of 4 is seen in part until then."""
    schedule = schedule_of("19", words="-w7")
    step = schedule.steps[0]
    (found,) = outgrown(schedule, step, (-1, window, -1))
    assert found[0] == slice(1, None, 2)
    assert sorted(found[1]) == sorted(step.requests[0].slots[: 4 * pages])
    assert list(outgrown(schedule, step, (-1, -1, -1))) == []
    both = list(outgrown(schedule, step, (window, window, window)))
    assert [layers for layers, _ in both] == [slice(0, None, 2), slice(1, None, 2)]


def test_a_shared_page_is_kept_while_any_request_sees_it() -> None:
    schedule = schedule_of("40.9", "shared")
    step = schedule.steps[0]
    long, short = step.requests
    assert long.shared
    assert short.shared
    (found,) = outgrown(schedule, step, (-1, 7, -1))
    assert set(found[1]) == set(long.slots[:32]) - set(short.slots)


@pytest.mark.parametrize("dtype", ["", "-kvfp8e4m3"])
def test_what_a_group_let_go_of_is_large_and_finite_in_its_layers_alone(dtype: str) -> None:
    schedule = schedule_of(words=f"{dtype}-w7")
    step = schedule.steps[0]
    data, windows = make_step_data(schedule, step), windows_of(schedule)
    (slots, minimal), (same, rows) = held_kv(step, data, after=True), stored_kv(schedule, step, data, after=True)
    assert np.array_equal(slots, same)
    image = pool_image(schedule, step, data, False, after=True).float()
    changed = np.zeros((3, len(slots)), np.bool_)
    for layers, gone in outgrown(schedule, step, windows):
        changed[layers] |= np.isin(slots, gone)
        assert len(gone)
        held = image[layers][:, :, torch.from_numpy(gone)]
        assert bool((held == (128.0 if dtype else 100.0)).all())
    assert np.array_equal((minimal != rows).any((1, 3)), changed)
    assert changed.any()
    assert not changed.all()


def test_without_groups_nothing_is_let_go_of() -> None:
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-bf16-p4-k40-shuffled-gauss-w7-layers3from5-b4prod"))
    assert list(outgrown(schedule, schedule.steps[0], (-1, 7, -1))) == []
    assert group_of_place(schedule, 1) == 0


def test_a_page_that_every_second_request_of_a_windowed_group_has_let_go_of_is_one_that_it_has_still() -> None:
    schedule = schedule_of("40.33.9.21", words="-w7")
    step = max(schedule.steps, key=lambda step: step.bs)
    page, window = schedule.case.page_size, 7
    table = table_of_group(schedule, step, window)
    changed = set[int]()
    for index, request in enumerate(step.requests):
        mine, before = table[request.pool_row], step.req_to_token[request.pool_row]
        gone = max(0, request.prefix - window) // page * page
        whole = (request.prefix + request.new) // page * page
        if index % 2 and 0 < gone < whole:
            assert mine[:page].tolist() == before[whole - page : whole].tolist()
            assert mine[page:].tolist() == before[page:].tolist()
            assert whole - page >= gone, "it is one that rows may see"
            changed.add(request.pool_row)
        else:
            assert mine.tolist() == before.tolist()
    assert changed
    assert table_of_group(schedule, step, -1) is step.req_to_token
