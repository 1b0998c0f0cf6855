"""Draft-decode: who sees whom, where branches lie in the request table, and what cases are made of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.co_residents import co_residents, declared_co_residents
from attn_testkit.cases.draft import Draft
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import (
    Bounds,
    Capabilities,
    DraftDecodeInput,
    ForwardMode,
    HeadShapes,
    KVPools,
    ServerConventions,
)
from attn_testkit.steps.data import make_step_data, pool_image
from attn_testkit.steps.foreign_slots import tail_slots
from attn_testkit.steps.schedule import make_schedule

DRAFT, DECODE, V1 = ForwardMode.DRAFT_DECODE, ForwardMode.DECODE, ForwardMode.DRAFT_EXTEND
NAME = "draft-decode-mha2-d64-bf16-p{page}-k{lens}-topk{k}steps{s}-shuffled-gauss-b3prod"


def case(lens: str = "7.16", k: int = 2, s: int = 3, page: int = 8) -> Case:
    return parse_case(NAME.format(lens=lens, k=k, s=s, page=page))


@pytest.mark.parametrize(("branches", "steps"), [(0, 2), (1, 1), (3, 1), (-1, 4)])
def test_a_draft_without_a_forward_is_refused(branches: int, steps: int) -> None:
    with pytest.raises(ValueError, match=f"not {branches} and {steps}"):
        Draft(branches, steps)


def test_the_smallest_draft_is_one_forward_of_one_row() -> None:
    draft = Draft(1, 2)
    assert (len(draft), draft.forwards, draft.depths) == (1, 1, (0,))
    assert draft.visible.tolist() == [[True]]


def test_a_row_sees_itself_and_those_before_it_in_its_branch() -> None:
    draft = Draft(2, 4)
    assert draft.depths == (0, 1, 2, 0, 1, 2)
    rows = ["".join("01"[int(seen)] for seen in row) for row in draft.visible]
    assert rows == ["100000", "110000", "111000", "000100", "000110", "000111"]


@pytest.mark.parametrize(
    ("prefix", "page", "columns", "copies", "room"),
    [
        # Slots: branches follow each other.
        (5, 1, [[5, 6, 7], [8, 9, 10]], [[]], 11),
        # A full last page: nothing to copy, and each branch begins a page.
        (8, 4, [[8, 9, 10], [12, 13, 14]], [[]], 15),
        # One token in the last page, and a branch fills it.
        (9, 4, [[9, 10, 11], [13, 14, 15]], [[12]], 16),
        # A branch runs into a second page.
        (10, 4, [[10, 11, 12], [18, 19, 20]], [[16, 17]], 21),
        (0, 4, [[0, 1, 2], [4, 5, 6]], [[]], 7),
    ],
)
def test_branches_lie_in_the_table_as_servers_lay_them(
    prefix: int, page: int, columns: list[list[int]], copies: list[list[int]], room: int
) -> None:
    draft = Draft(2, 3)
    assert draft.columns(prefix, page).tolist() == columns
    assert draft.copies(prefix, page).tolist() == copies
    assert draft.room(prefix, page) == room


@pytest.mark.parametrize("page", [1, 2, 4, 16])
@pytest.mark.parametrize(("k", "s"), [(1, 2), (1, 5), (2, 3), (3, 6), (4, 2)])
def test_the_contract_finds_each_key_of_a_branch_where_the_case_has_it(k: int, s: int, page: int) -> None:
    schedule = make_schedule(replace(case(k=k, s=s, page=page), prefixes=(0, 1, 15, 16, 17, 3), bucket=6))
    step = schedule.steps[0]
    table = torch.from_numpy(step.req_to_token[[r.pool_row for r in step.requests]])
    lens = torch.tensor([r.prefix for r in step.requests])
    spec = DraftDecodeInput(topk=k, num_steps=s, out_cache_loc=torch.zeros(0))
    found = spec.key_slots(table, lens, page, torch.arange(table.shape[1]))
    assert found.shape == (6 * k, table.shape[1])
    for b, request in enumerate(step.requests):
        shared = request.prefix - request.prefix % page
        for j in range(k):
            row = found[b * k + j].numpy()
            own = request.slots[request.prefix :].reshape(k, s - 1)[j]
            assert np.array_equal(row[:shared], request.slots[:shared])
            tail = request.slots[shared : request.prefix] if j == 0 else request.copies[j - 1]
            assert np.array_equal(row[shared : request.prefix], tail)
            assert np.array_equal(row[request.prefix : request.prefix + s - 1], own)


def test_no_two_branches_write_into_one_page() -> None:
    for page in (4, 16):
        for step in make_schedule(case("7.16.33", 3, 6, page)).steps:
            pages = [
                set((branch // page).tolist())
                for r in step.requests
                for branch in r.slots[r.prefix :].reshape(3, -1)
            ]  # fmt: skip
            assert sum(map(len, pages)) == len(set().union(*pages))


def test_copies_hold_what_the_last_tokens_of_the_prefix_hold() -> None:
    for dtype in ("", "-kvfp8e4m3"):
        schedule = make_schedule(parse_case(NAME.format(lens="7.16", k=3, s=3, page=8).replace("-b3", f"{dtype}-b3")))
        step = schedule.steps[0]
        data = make_step_data(schedule, step)
        image = pool_image(schedule, step, data, False, after=False)
        image = image.view(torch.uint8) if image.dtype.itemsize == 1 else image
        partial, full = step.requests
        assert partial.copies.shape == (2, 7)
        assert full.copies.shape == (2, 0)
        for copy in partial.copies:
            assert torch.equal(image[:, :, torch.from_numpy(copy)], image[:, :, torch.from_numpy(partial.slots[:7])])


def test_the_tail_of_a_request_is_every_slot_of_its_branches_that_holds_no_key() -> None:
    (request,) = make_schedule(replace(case("9", 2, 3, 4), bucket=1)).steps[0].requests
    # Branch 0: columns 8 .. 11, of which 8 is a key. Branch 1: 12 .. 15, of which 12 is its copy.
    assert sorted(tail_slots(request, 4)) == sorted(request.table_slots[[9, 10, 11, 13, 14, 15]])


def test_a_draft_goes_with_its_mode_alone() -> None:
    with pytest.raises(ValueError, match="it lacks rows"):
        parse_case("draft-decode-mha2-d64-bf16-p16-k5-shuffled-gauss-b1prod")
    with pytest.raises(ValueError, match="rows of decode have no draft"):
        parse_case("decode-mha2-d64-bf16-p16-k5-topk1steps2-shuffled-gauss-b1prod")


def declared(**changes: object) -> Capabilities:
    every: dict[str, object] = {
        "eager": {DRAFT, DECODE},
        "graph": {DRAFT, DECODE},
        "bounds": {"max_context_len": 1 << 13},
    }
    return Capabilities(**every).with_changes(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("most", "tried"), [(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (7, {1, 2, 3, 4, 7})])
def test_drafts_have_as_many_branches_as_are_declared_and_never_more(most: int, tried: set[int]) -> None:
    cases = generate(declared(bounds={"max_draft_branches": most}), DRAFT, "core")
    assert {each.draft.branches for each in cases if each.draft} == tried
    assert {each.draft.steps for each in cases if each.draft} >= {2, 4, 7}
    hosts = [
        each for each in generate(declared(bounds={"max_draft_branches": most}), DECODE, "core") if each.multi_mode
    ]
    (draft,) = (each.draft for host in hosts for each in co_residents(host, {DRAFT}, 1, max_draft_branches=most))
    assert draft == Draft(min(2, most), 3)


def test_capabilities_of_draft_decode_are_whole_numbers_from_1_on() -> None:
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="max_draft_branches must be a whole number from 1 on"):
            declared(bounds={"max_draft_branches": wrong})


@pytest.mark.parametrize(("rows", "steps"), [(1, None), (2, None), (3, 2), (4, 3), (9, 3)])
def test_beside_draft_extends_a_draft_has_their_steps(rows: int, steps: int | None) -> None:
    """S is one number of an instance, and v1 has S + 1 rows."""
    (host,) = (each for each in generate(declared(), DECODE, "core") if each.multi_mode)
    found = {each.mode: each for each in co_residents(host, {DRAFT, V1}, rows)}
    assert found[V1].width == min(rows, 4)
    assert (found[DRAFT].draft == Draft(1, steps)) if steps else (DRAFT not in found)


@pytest.mark.parametrize("tier", ["smoke", "core"])
def test_who_declares_no_empty_prefix_has_none_in_any_step_of_any_case(tier: str) -> None:
    declared = Capabilities(
        eager={DRAFT},
        graph={DRAFT},
        heads=HeadShapes(families={"gqa"}),
        bounds=Bounds(max_draft_branches=4),
        server=ServerConventions(drafts_without_prefix=False),
    )
    asked = generate(declared.with_changes(server={"drafts_without_prefix": True}), DRAFT, tier)
    found = generate(declared, DRAFT, tier)
    assert len(found) >= len(asked) * 0.9, "what had an empty prefix is not left out"
    assert all(parse_case(each.id) == each for each in found)
    schedules = [make_schedule(each) for each in found]
    steps = [step for schedule in schedules for step in (*schedule.steps, schedule.second)]
    assert min(r.prefix for step in steps for r in step.requests) == 1, "one key is the least, and is tried"


def test_a_draft_that_shares_an_instance_has_no_empty_prefix_either() -> None:
    host = parse_case("decode-mha2-d64-bf16-p8-k0.16-shuffled-gauss-b3prod-multi_mode")
    declared = Capabilities(
        eager={DECODE, DRAFT},
        graph={DECODE, DRAFT},
        kv_pool=KVPools(page_sizes={8}),
        server=ServerConventions(drafts_without_prefix=False),
    )
    (draft,) = declared_co_residents(declared, host, {DRAFT})
    assert (draft.prefixes, draft.with_prefix, host.prefixes) == ((1, 16), True, (0, 16))
    (with_empty,) = declared_co_residents(declared.with_changes(server={"drafts_without_prefix": True}), host, {DRAFT})
    assert (with_empty.prefixes, with_empty.with_prefix) == ((0, 16), False)


@pytest.mark.parametrize("word", ["k0.16", "k5.0"])
def test_a_case_cannot_be_prefixed_and_have_an_empty_prefix(word: str) -> None:
    with pytest.raises(ValueError, match="prefixed, with keys"):
        parse_case(case().id.replace("k7.16", word).replace("steps3", "steps3-prefixed"))


def test_only_a_draft_is_prefixed() -> None:
    with pytest.raises(ValueError, match="rows of decode have no with_prefix"):
        parse_case("decode-mha2-d64-bf16-p8-k7.16-prefixed-shuffled-gauss-b3prod")
