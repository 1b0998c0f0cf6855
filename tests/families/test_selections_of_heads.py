"""Selections of KV heads and selected pages: what the backend gets, what is right, and which mistakes are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseHeadsBackend, TorchNativeSparsePagesBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Capabilities, Indexer, Sparse
from attn_testkit.families.softmax import answer as softmax
from attn_testkit.families.sparse.data import make_sparse_data
from attn_testkit.families.sparse.family import SPARSE, answer
from attn_testkit.steps.data import StepData
from attn_testkit.steps.schedule import Schedule, Step, make_schedule
from attn_testkit_corpus.faults.s_selected_by_heads import (
    HeadMajorSelectionAssumed,
    LastListedPageIsCutOff,
    SelectionAtTheRowOfItsRequest,
    SelectionOfKvHeadZero,
    SetOfTheQueryHead,
)

VERIFY = "target-verify-gqa4x2-d64-bf16-p16-k100.9.140-chain4-shuffled-gauss-sel4of16{}-b4prod"
EXTEND = "extend-gqa4x2-d64-bf16-p16-k100.9-n12a20.10-chunks2-shuffled-gauss-sel4of16{}-b3prod"
DECODE = "decode-gqa4x2-d64-bf16-p16-k100.9.140-shuffled-gauss-sel4of16{}-b4prod"
DRAFT = DECODE.replace("decode-", "draft-decode-").replace("-shuffled", "-topk1steps3-shuffled")


def first_step(case_id: str) -> tuple[Schedule, Step, StepData]:
    schedule = make_schedule(parse_case(case_id))
    return schedule, schedule.steps[0], make_sparse_data(schedule, schedule.steps[0])


def attended(data: StepData, layer: int, row: int, head: int) -> list[int]:
    assert data.allowed is not None
    found: list[int] = data.allowed[layer, data.row_request[row], data.row_offset[row], head].nonzero()[:, 0].tolist()
    return found


@pytest.mark.parametrize("case_id", [VERIFY.format("perhead"), EXTEND.format("perheadholes")])
def test_each_kv_head_of_a_row_attends_to_the_visible_keys_of_its_own_blocks(case_id: str) -> None:
    _, step, data = first_step(case_id)
    assert data.selected is not None
    assert data.selected.shape == (2, step.tokens, 2, 4)
    other_keys = 0
    for layer, rows in enumerate(data.selected.tolist()):
        for row, heads in enumerate(rows):
            own = int(data.positions[row])
            for head, listed in enumerate(heads):
                blocks = {each for each in listed if each >= 0}
                assert own // 16 in blocks
                assert attended(data, layer, row, head) == [key for key in range(own + 1) if key // 16 in blocks]
            other_keys += attended(data, layer, row, 0) != attended(data, layer, row, 1)
    assert other_keys > step.tokens, "heads of most rows with more keys than they select differ"


@pytest.mark.parametrize("without_own", ["", "withoutown"])
def test_pages_are_those_of_the_request_table_in_the_order_of_the_request(without_own: str) -> None:
    _, step, data = first_step(VERIFY.format(f"pagesperhead{without_own}"))
    assert data.selected is not None
    left_out = 0
    for layer, rows in enumerate(data.selected.tolist()):
        for row, heads in enumerate(rows):
            own, slots = int(data.positions[row]), step.requests[int(data.row_request[row])].slots
            table = (slots[::16] // 16).tolist()
            for head, listed in enumerate(heads):
                blocks = [table.index(page) for page in listed if page >= 0]
                assert blocks == sorted(set(blocks))
                assert listed == [table[block] for block in blocks] + [-1] * (4 - len(blocks))
                assert attended(data, layer, row, head) == [key for key in range(own + 1) if key // 16 in blocks]
                left_out += own // 16 not in blocks
    assert bool(left_out) is bool(without_own)


def test_the_answer_of_a_head_is_that_of_a_backend_whose_heads_all_have_its_selection() -> None:
    schedule, _, data = first_step(VERIFY.format("perhead").replace("-b4prod", "-lsewhole-b4prod"))
    found = answer(schedule, data, False)
    assert data.allowed is not None
    assert found.lse is not None
    for head in range(2):
        alike = softmax.answer(schedule, replace(data, allowed=data.allowed[:, :, :, head]), False)
        own = slice(4 * head, 4 * head + 4)
        assert alike.lse is not None
        assert torch.allclose(found.out[:, :, own], alike.out[:, :, own], atol=1e-12)
        assert torch.allclose(found.limit[:, :, own], alike.limit[:, :, own], rtol=1e-9)
        assert torch.allclose(found.lse[..., own], alike.lse[..., own])
        assert bool(((found.out - alike.out).abs() > found.limit)[:, :, 4 - 4 * head].any()), "the other head's differ"


def test_a_kv_head_without_a_key_may_give_any_finite_number_and_other_heads_of_its_row_may_not() -> None:
    schedule, _, data = first_step(VERIFY.format("perheadempty").replace("sel4of16", "sel16"))
    found = answer(schedule, data, False)
    assert data.allowed is not None
    empty = ~data.allowed.any(-1)[:, data.row_request, data.row_offset]
    assert bool((empty.any(-1) & ~empty.all(-1)).any()), "in some row only one head has no key"
    assert torch.equal(found.limit.isinf().all(-1), empty.repeat_interleave(4, 2))


def test_keys_that_one_head_selects_are_numbers_for_all_heads_and_those_of_none_are_nan() -> None:
    schedule, _, _ = first_step(DECODE.format("perhead"))
    step = schedule.steps[1]
    data = make_sparse_data(schedule, step)
    image = SPARSE.memory.image(schedule, step, data, False, after=False).float()
    assert data.allowed is not None
    place = max(range(step.bs), key=lambda place: step.requests[place].prefix)
    request = step.requests[place]
    by_head = data.allowed[0, place, 0, :, : request.prefix]
    assert not torch.equal(by_head[0], by_head[1])
    assert not by_head.any(0).all()
    keys = image[0, 0, torch.from_numpy(request.slots[: request.prefix])].flatten(1)
    assert keys.isfinite().all(1).equal(by_head.any(0))
    assert keys.isnan().all(1).equal(~by_head.any(0))


@pytest.mark.parametrize(
    ("backend", "cases"),
    [
        (TorchNativeSparseHeadsBackend, [f"{DECODE}-wider_buffers".format("perheadholes"), EXTEND.format("perhead")]),
        (TorchNativeSparsePagesBackend, [VERIFY.format("pagesperheadwithoutown"), DRAFT.format("pagesperhead")]),
    ],
)
def test_a_right_backend_passes_in_eager_and_in_graphs(backend: type, cases: list[str]) -> None:
    found = [each for each in check_backend(backend, device="cpu", cases=cases) if each.case]
    assert [each for each in found if each.status != "passed"] == []
    assert len(found) == 2 * len(cases)


@pytest.mark.parametrize(
    ("backend", "case_id", "hint"),
    [
        (SelectionOfKvHeadZero, DECODE.format("perhead"), "all KV heads use the selection of KV head 0"),
        (SetOfTheQueryHead, DECODE.format("perhead"), "as if `selected` had one per query head"),
        (HeadMajorSelectionAssumed, VERIFY.format("perhead"), "is read as [Hk, T, topk]"),
        (SelectionAtTheRowOfItsRequest, VERIFY.format("perhead"), "the selection of the first request"),
        (LastListedPageIsCutOff, DECODE.format("pagesperheadwithoutown"), "cuts off a block as if"),
    ],
)
def test_a_mistake_about_heads_or_pages_is_found_and_named(backend: type, case_id: str, hint: str) -> None:
    found = check_backend(backend, device="cpu", cases=[case_id], executions=["eager"])
    (finding,) = next(result.findings for result in found if result.case)
    assert finding.check == "matches-oracle"
    assert hint in finding.hint
    assert " head " in finding.attended


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"block": 16, "index_space": "slots"}, "Sparse.block"),
        ({"index_space": "pages"}, "needs block"),
        ({"block": 16, "index_space": "pages", "holes": True}, "excludes holes"),
        ({"without_own_block": True}, "needs block above 1"),
        ({"per_kv_head": True, "indexer": Indexer(heads={4})}, "excludes indexer"),
    ],
)
def test_forms_of_selections_that_no_case_has_are_refused(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sparse(topk={4}, **given)


def test_selected_pages_are_as_large_as_the_pages_of_the_pool() -> None:
    with pytest.raises(ValueError, match=r"declare kv_pool\.page_sizes=\{64\}"):
        Capabilities(eager={"decode"}, sparse=Sparse(topk={4}, block=64, index_space="pages"))
    with pytest.raises(ValueError, match="an index is a page of the KV pool"):
        parse_case(DECODE.format("pages").replace("-p16-", "-p64-"))
