"""Sparse attention: selections, what the backend gets, what memory holds, and what is right."""

from __future__ import annotations

import math

import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend, TorchNativeSparseSlotsBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode, LogSumExp, Sparse
from attn_testkit.families.softmax import answer as softmax
from attn_testkit.families.sparse.data import make_sparse_data
from attn_testkit.families.sparse.family import SPARSE, answer
from attn_testkit.families.table import family_of, meaningless
from attn_testkit.steps.data import make_step_data
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.s_selected_blocks import (
    BlockTakenForItsFirstKey,
    BlockZeroForMinusOne,
    OwnBlockLeftOut,
    OwnBlockNotCutOff,
)
from attn_testkit_corpus.faults.s_selected_keys import (
    FirstHoleEndsTheRow,
    MinusOneClampedToSlotZero,
    OneSelectionPerRequest,
    SelectionIgnored,
    UnselectedKeysMultipliedByZero,
)
from attn_testkit_corpus.faults.s_selected_rows import (
    LseOfARowWithoutKeysIsPlusInf,
    SelectionsAlignedWithTheLastRows,
    SelectionsAssumedForAllRows,
)
from attn_testkit_corpus.faults.sparse import SparseBlocks, SparseWithSums

DECODE = "decode-mqa4-d64-bf16-p16-k40.9.100-shuffled-gauss-sel16-b4prod"
VERIFY = "target-verify-mqa4-d64-bf16-p16-k40.9.100-chain4-shuffled-gauss-sel16{}-b4prod"
EXTEND = "extend-mqa4-d64-bf16-p16-k40.9-n20a30.10-chunks2-shuffled-gauss-sel16-b3prod"
MODES = [
    DECODE,
    VERIFY.format("holesempty"),
    EXTEND,
    "draft-extend-v2-mla16-d64r32-bf16-p16-k40.9-n4a4.2-shuffled-gauss-sel16-b2prod",
    "draft-decode-mqa4-d64-bf16-p16-k40.9-topk2steps3-shuffled-gauss-sel16-b2prod",
]


def first_step(case_id: str):
    schedule = make_schedule(parse_case(case_id))
    return schedule, schedule.steps[0]


@pytest.mark.parametrize("case_id", MODES)
def test_each_row_selects_different_keys_that_it_may_see_and_some_that_are_not_its_newest(case_id: str) -> None:
    schedule, step = first_step(case_id)
    data = make_sparse_data(schedule, step)
    assert family_of(schedule.case) is SPARSE
    assert data.allowed is not None
    assert data.selected is not None
    assert not (data.allowed & ~data.visible).any()
    count = data.allowed.sum(-1)[:, data.row_request, data.row_offset]
    assert torch.equal(count, (data.selected >= 0).sum(-1)), "each index is another key"
    seen = data.visible.sum(-1)[data.row_request, data.row_offset]
    assert bool((count <= 16).all())
    assert bool((count < seen).any()), "some key is left out"
    assert len({tuple(layer.flatten().tolist()) for layer in data.allowed}) == len(data.allowed), "layers differ"


def test_indices_are_positions_or_slots_of_the_same_keys() -> None:
    of = {}
    for space in ("", "slots"):
        schedule, step = first_step(VERIFY.format(space))
        data = make_sparse_data(schedule, step)
        assert data.selected is not None
        of[space] = schedule, step, data
    for space, (_, step, data) in of.items():
        for row, index in enumerate(data.selected[0].tolist()):
            request = step.requests[int(data.row_request[row])]
            keys = [i for i in index if i >= 0]
            places = [request.slots.tolist().index(i) for i in keys] if space else keys
            assert data.allowed[0, data.row_request[row], data.row_offset[row]].nonzero()[:, 0].tolist() == sorted(
                places
            )


def test_minus_one_is_behind_the_keys_unless_holes_are_declared() -> None:
    def holes(case_id: str) -> bool:
        data = make_sparse_data(*first_step(case_id))
        assert data.selected is not None
        return bool(((data.selected[..., :-1] < 0) & (data.selected[..., 1:] >= 0)).any())

    assert not holes(VERIFY.format(""))
    assert holes(VERIFY.format("holes"))


def test_a_chunk_and_a_part_of_a_step_have_the_selections_of_the_whole() -> None:
    schedule = make_schedule(parse_case(EXTEND))
    chunks = [step for step in schedule.steps if step.chunk_of is not None]
    assert len(chunks) > 1
    for step in chunks:
        mine, whole = (make_sparse_data(schedule, each).selected for each in (step, step.chunk_of))
        assert mine is not None
        assert whole is not None
        rows = {tuple(row) for row in whole[0].tolist()}
        assert {tuple(row) for row in mine[0].tolist()} <= rows


@pytest.mark.parametrize("pool", ["", "-kvfp8e4m3"])
def test_the_image_of_a_pool_has_nan_where_no_row_selects_and_numbers_where_one_does(pool: str) -> None:
    schedule = make_schedule(parse_case(DECODE.replace("-sel16", f"{pool}-sel16")))
    step = schedule.steps[1]
    data = make_sparse_data(schedule, step)
    image = SPARSE.memory.image(schedule, step, data, False, after=False).float()
    assert data.allowed is not None
    place = max(range(step.bs), key=lambda place: step.requests[place].prefix)
    request = step.requests[place]
    selected = data.allowed[0, place, 0, : request.prefix]
    assert not selected.all()
    keys = image[0, 0, torch.from_numpy(request.slots[: request.prefix])].flatten(1)
    assert keys.isnan().all(1).equal(~selected)
    assert keys.isfinite().all(1).equal(selected)


def test_a_chunk_that_is_not_causal_selects_later_keys_of_its_own_rows_and_none_of_later_chunks() -> None:
    schedule = make_schedule(parse_case(f"{EXTEND}-noncausal"))
    later = False
    for step in (step for step in schedule.steps if step.chunk_of is not None):
        data = make_sparse_data(schedule, step)
        assert data.allowed is not None
        assert data.allowed.shape[-1] == max(step.lens)
        assert not (data.allowed & ~data.visible).any()
        keys = torch.arange(max(step.lens))
        rows = data.allowed[:, data.row_request, data.row_offset]
        later = later or bool((rows & (keys > data.row_key[:, None])).any())
    assert later


def test_where_every_key_is_selected_the_answer_is_that_of_dense_attention() -> None:
    schedule, step = first_step(DECODE.replace("k40.9.100", "k4.9.14"))
    found = answer(schedule, make_sparse_data(schedule, step), False)
    dense = softmax.answer(schedule, make_step_data(schedule, step), False)
    assert torch.allclose(found.out, dense.out, atol=1e-12)
    schedule, step = first_step(DECODE)
    found = answer(schedule, make_sparse_data(schedule, step), False)
    dense = softmax.answer(schedule, make_step_data(schedule, step), False)
    assert bool(((found.out - dense.out).abs() > found.limit).any())


def test_a_row_that_selects_no_key_may_give_any_finite_number() -> None:
    schedule, step = first_step(VERIFY.format("empty"))
    data = make_sparse_data(schedule, step)
    found = answer(schedule, data, False)
    assert data.allowed is not None
    empty = ~data.allowed.any(-1)[:, data.row_request, data.row_offset]
    assert empty.any(1).all()
    assert bool((found.limit[empty] == math.inf).all())
    assert bool(found.limit[~empty].isfinite().all())
    assert bool(found.out.isfinite().all())


def test_a_row_without_a_key_has_a_log_sum_exp_of_minus_infinity() -> None:
    schedule, step = first_step(VERIFY.format("empty").replace("-b4prod", "-lsewhole-b4prod"))
    data = make_sparse_data(schedule, step)
    found = answer(schedule, data, False)
    assert data.allowed is not None
    assert found.lse is not None
    empty = ~data.allowed.any(-1)[:, data.row_request, data.row_offset]
    assert bool((found.lse[empty] == -math.inf).all())
    assert bool(found.lse[~empty].isfinite().all())


@pytest.mark.parametrize(
    ("backend", "case_id", "check"),
    [
        (SelectionsAssumedForAllRows, f"{DECODE}-padded_tokens", "completes"),
        (SelectionsAlignedWithTheLastRows, f"{DECODE}-padded_tokens", "matches-oracle"),
        (LseOfARowWithoutKeysIsPlusInf, VERIFY.format("empty").replace("-b4prod", "-lsewhole-b4prod"), "log-sum-exp"),
    ],
)
def test_fewer_selections_than_rows_and_empty_rows_are_given_to_those_who_declare_them(
    backend: type, case_id: str, check: str
) -> None:
    (wrong,) = [
        each for each in check_backend(backend, device="cpu", cases=[case_id], executions=["eager"]) if each.case
    ]
    assert check in {each.check for each in wrong.findings}
    found = [each for each in check_backend(SparseWithSums, device="cpu", cases=[case_id]) if each.case]
    assert [each.status for each in found] == ["passed", "passed"]


BLOCKS = "target-verify-gqa4x2-d64-bf16-p16-k140.9.300-chain4-shuffled-gauss-sel4of16{}-b4prod"


@pytest.mark.parametrize("holes", ["", "holes"])
def test_a_row_attends_the_visible_keys_of_its_blocks_and_its_own_block_is_one_of_them(holes: str) -> None:
    schedule, step = first_step(BLOCKS.format(holes))
    data = make_sparse_data(schedule, step)
    assert data.selected is not None
    assert data.allowed is not None
    left_out = 0
    for layer, rows in enumerate(data.selected.tolist()):
        for row, listed in enumerate(rows):
            blocks = [each for each in listed if each >= 0]
            assert len(set(blocks)) == len(blocks) <= 4
            own = int(data.positions[row])
            assert own // 16 in blocks
            attended = data.allowed[layer, data.row_request[row], data.row_offset[row]].nonzero()[:, 0].tolist()
            assert attended == [key for key in range(own + 1) if key // 16 in blocks]
            left_out += len(attended) <= own
    assert left_out > 8


@pytest.mark.parametrize(
    ("backend", "checks"),
    [
        (BlockTakenForItsFirstKey, {"matches-oracle", "reads-own-kv"}),
        (OwnBlockNotCutOff, {"matches-oracle", "reads-own-kv"}),
        (BlockZeroForMinusOne, {"matches-oracle"}),
        (OwnBlockLeftOut, {"matches-oracle"}),
    ],
)
def test_mistakes_about_blocks_are_found_and_a_right_backend_passes(backend: type, checks: set[str]) -> None:
    case = BLOCKS.format("holes").replace("gqa4x2", "mqa4")
    (wrong,) = [each for each in check_backend(backend, device="cpu", cases=[case], executions=["eager"]) if each.case]
    assert {each.check for each in wrong.findings} & checks
    found = [each for each in check_backend(SparseBlocks, device="cpu", cases=[case]) if each.case]
    assert [each.status for each in found] == ["passed", "passed"]


@pytest.mark.parametrize(
    "given", [{"block": 0}, {"block": 16, "index_space": "slots"}, {"block": 16, "empty_rows": True}]
)
def test_blocks_that_no_case_has_are_refused(given: dict) -> None:
    with pytest.raises(ValueError, match=r"Sparse\.block"):
        Sparse(topk={4}, **given)


def test_fewer_rows_are_not_declared_without_rows_of_padding() -> None:
    with pytest.raises(ValueError, match="takes_more_rows"):
        Capabilities(eager={"decode"}, sparse=Sparse(topk={16}, fewer_rows=True))


def test_keys_that_no_row_selects_hold_nan_in_their_layer_from_the_second_step_on() -> None:
    schedule = make_schedule(parse_case(DECODE))
    lost = []
    for step in schedule.steps[:2]:
        data = make_sparse_data(schedule, step)
        slots, rows = SPARSE.memory.held(schedule, step, data, after=False)
        numbers = torch.from_numpy(rows).view(torch.bfloat16)
        lost.append(numbers.isnan().all(-1).all(1))
        assert data.allowed is not None
        for place, request in enumerate(step.requests):
            for layer in range(len(data.allowed)):
                keys = data.allowed[layer, place].any(0)[: request.prefix]
                at = [slots.tolist().index(slot) for slot in request.slots[: request.prefix][keys.numpy()]]
                assert not bool(lost[-1][layer, at].any()), "a selected key is what it is"
    assert [bool(each.any()) for each in lost] == [False, True]
    assert not torch.equal(lost[1][0], lost[1][1])
    _, rows = SPARSE.memory.held(schedule, schedule.steps[1], make_sparse_data(schedule, schedule.steps[1]),
                                 after=False, unowned=0.0)  # fmt: skip
    assert bool(torch.from_numpy(rows).view(torch.bfloat16).isfinite().all())


@pytest.mark.parametrize("backend", [TorchNativeSparseBackend, TorchNativeSparseSlotsBackend])
def test_a_right_backend_passes_each_mode_in_eager_and_in_graphs(backend: type) -> None:
    slots = "slots" if backend is TorchNativeSparseSlotsBackend else ""
    cases = [case.replace("sel16", f"sel16{slots}") for case in MODES]
    found = [each for each in check_backend(backend, device="cpu", cases=cases) if each.case]
    assert [each for each in found if each.status != "passed"] == []
    assert len(found) == 2 * len(cases)


@pytest.mark.parametrize(
    ("backend", "case_id", "check", "headline", "hint"),
    [
        (SelectionIgnored, DECODE, "matches-oracle", "over the limit", "the selection is ignored"),
        (
            OneSelectionPerRequest,
            VERIFY.format(""),
            "matches-oracle",
            "over the limit",
            "the selection of its first row",
        ),
        (FirstHoleEndsTheRow, VERIFY.format("holes"), "matches-oracle", "over the limit", "after its first -1"),
        (
            UnselectedKeysMultipliedByZero,
            DECODE,
            "reads-own-kv",
            ": it read keys that no row selects",
            "0 * NaN is NaN",
        ),
        (
            MinusOneClampedToSlotZero,
            VERIFY.format("holes"),
            "reads-own-kv",
            ": it read a slot of another owner",
            "NaN in unowned slots",
        ),
    ],
)
def test_the_usual_mistakes_are_named(backend: type, case_id: str, check: str, headline: str, hint: str) -> None:
    found = check_backend(backend, device="cpu", cases=[case_id], executions=["eager"])
    (finding,) = next(each.findings for each in found if each.case)
    assert finding.check == check
    assert headline in finding.headline
    assert hint in finding.hint


@pytest.mark.parametrize("mode", ForwardMode)
def test_every_declared_width_leaves_keys_out_in_some_case_of_core(mode: ForwardMode) -> None:
    declared = TorchNativeSparseBackend.capabilities
    cases = list(generate(declared, mode, "core", 0))
    assert all(case.selection is not None and not meaningless(case) for case in cases)
    assert declared.sparse is not None
    for topk in declared.sparse.topk:
        longest = max(max(case.prefixes) for case in cases if case.selection and case.selection.topk == topk)
        assert longest >= min(2 * topk, 2_100)
    assert {case.selection.holes for case in cases if case.selection} == {False, True}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sparse": 16}, "must be a Sparse"),
        ({"sparse": Sparse(topk={16}), "windows": {"decode"}}, "sparse and windows"),
        ({"sparse": Sparse(topk={16}), "kv_pool": {"kv_groups": True}}, "sparse and kv_pool.kv_groups"),
        (
            {"sparse": Sparse(topk={16}), "lse": LogSumExp("e", prefix={"decode"})},
            "sparse and KV splits other than whole",
        ),
    ],
)
def test_capabilities_that_no_case_has_together_are_refused(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Capabilities(eager={"decode"}, **given)


@pytest.mark.parametrize("given", [{"topk": set()}, {"topk": {0}}, {"topk": {16}, "index_space": "rows"}])
def test_a_sparse_record_that_says_nothing_is_refused(given: dict) -> None:
    with pytest.raises(ValueError, match=r"topk|index_space"):
        Sparse(**given)


def test_slots_of_a_pool_beyond_2_31_elements_are_those_of_the_pool() -> None:
    case = "decode-mqa4-d64-bf16-p16-k9.37.1-shuffled-gauss-sel16slots-layers1from0-b4prod-bigpool"
    schedule, step = first_step(case)
    selected = make_sparse_data(schedule, step).selected
    assert selected is not None
    assert int(selected.max()) > (schedule.num_pages + 1) * 16
