"""The indexer: its data, what is right, what it stores and selects, and the hints of its checks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.checks.selection_hints import consistent
from attn_testkit.contract import ForwardMode, Indexer, IndexPool, LogSumExp, Sparse
from attn_testkit.contract.index_pool import index_scales, keys_of, scales_of
from attn_testkit.families.sparse.data import make_sparse_data
from attn_testkit.families.sparse.family import answer
from attn_testkit.families.sparse.index_scores import RowScores, best_keys, row_scores, stored_index
from attn_testkit.results.case_result import Status
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.index_data import IndexData, index_memory, make_index_data
from attn_testkit.steps.schedule import make_schedule, only
from attn_testkit_corpus.faults import s_draft_selections as drafts
from attn_testkit_corpus.faults import s_indexers as faults
from attn_testkit_corpus.faults import s_shared_selections as shared
from attn_testkit_corpus.faults.controls_of_selections import (
    IndexerFused,
    IndexerOneBuffer,
    IndexerPowerOfTwoScales,
    IndexerUnsorted,
)
from attn_testkit_corpus.faults.indexer import IndexerParent

DECODE = "decode-mqa4-d64-bf16-p16-k100.37-shuffled-gauss-sel16-idx4{}-b4prod"
VERIFY = "target-verify-mqa4-d64-bf16-p16-k40.9.100-chain4-shuffled-gauss-sel16-idx4{}-b4nan"
EXTEND = "extend-mqa4-d64-bf16-p16-k40.9-n20a30.10-chunks2-shuffled-gauss-sel16-idx4{}-b3prod"
V2 = "draft-extend-v2-mla16-d64r32-bf16-p16-k40.9-n4a4.2-shuffled-gauss-sel16-idx4{}-b2prod"
DRAFT = "draft-decode-mqa4-d64-bf16-p16-k100.37-topk1steps4-shuffled-gauss-sel16-idx4{}-b2prod"
MODES = [DECODE, VERIFY, EXTEND, V2]


def first_step(case_id: str):
    schedule = make_schedule(parse_case(case_id))
    return schedule, schedule.steps[0]


def findings(backend, case_id: str, execution: str = "eager"):
    results = check_backend(backend, cases=[case_id], device="cpu", executions=(execution,))
    (result,) = (each for each in results if each.status is not Status.UNSUPPORTED)
    assert result.status in (Status.PASSED, Status.FAILED), result.reason
    return result.findings


# What an index pool is.


def test_a_page_has_64_keys_and_then_64_scales() -> None:
    pool = IndexPool(130, [3], "amax", torch.device("cpu"))
    assert pool.memory.shape == (1, 3, 64 * 132)
    key = torch.zeros(1, 128)
    key[0, 5], key[0, 6] = 448.0, -3.0
    pool.store(3, torch.tensor([65]), 0.5 * key)
    page = pool.get_index_buffer(3)[1]
    assert page[128:256].view(torch.float8_e4m3fn).float()[5:7].tolist() == [448.0, -3.0]
    assert page[8192:].view(torch.float32)[:3].tolist() == [0.0, 0.5, 0.0]
    assert int((pool.memory != 0).sum()) == 2 + 1, "two numbers of a key, and one byte of 0.5"
    with pytest.raises(KeyError, match="layer 4 has no index keys; layers 3 have"):
        pool.get_keys(4)


@pytest.mark.parametrize(("largest", "want"), [(448.0, 1.0), (448.1, 2.0), (449 * 0.5, 1.0), (224.0, 0.5)])
def test_a_power_of_two_scale_is_the_next_one(largest: float, want: float) -> None:
    assert index_scales(torch.tensor([[largest, -1.0]]), "power_of_two").tolist() == [want]


# The data.


@pytest.mark.parametrize("case_id", MODES)
def test_exact_data_have_one_best_selection_and_leave_keys_out(case_id: str) -> None:
    schedule, step = first_step(case_id.format(""))
    data, index = make_sparse_data(schedule, step), make_index_data(schedule, step)
    left_out = 0
    for layer in range(2):
        keys, scales = stored_index(index.by_slot[layer], "amax")
        assert torch.equal((keys * scales[:, None]).float(), index.by_slot[layer].float()), "FP8 holds the keys exactly"
        for each in row_scores(data, index, layer, keys, scales):
            ordered = each.scores.sort(descending=True).values
            if len(ordered) > 16:
                left_out += 1
                assert ordered[15] > ordered[16]
                assert torch.equal(each.scores.float().double(), each.scores), "float32 holds the scores"
    assert left_out
    assert int((index.q.float() @ index.by_slot[:, None, :, :].float().mT[..., :1]).abs().max()) < 2**13, (
        "13 bits hold the sums, as tensor cores of SM90 have them"
    )


def test_ties_are_between_a_selected_key_and_one_that_is_not() -> None:
    schedule, step = first_step(DECODE.format("ties"))
    data, index = make_sparse_data(schedule, step), make_index_data(schedule, step)
    keys, scales = stored_index(index.by_slot[0], "amax")
    ends = [each.scores.sort(descending=True).values[15:17] for each in row_scores(data, index, 0, keys, scales)]
    assert any(last == following for last, following in ends)


def test_a_part_and_a_chunk_of_a_step_have_the_numbers_of_the_whole() -> None:
    schedule, step = first_step(VERIFY.format(""))
    whole, part = make_index_data(schedule, step), make_index_data(schedule, only(step, 1))
    assert torch.equal(part.weights, whole.weights[:, 4:8])
    assert torch.equal(part.k, whole.k[:, 4:8])
    assert np.array_equal(part.slots[0], step.requests[1].slots)
    schedule, chunk = first_step(EXTEND.format(""))
    assert chunk.chunk_of is not None
    whole, part = make_index_data(schedule, chunk.chunk_of), make_index_data(schedule, chunk)
    first = chunk.requests[0].new
    assert torch.equal(part.weights[:, :first], whole.weights[:, :first])
    assert part.weights.shape[1] == chunk.tokens < chunk.chunk_of.tokens


def test_memory_holds_the_keys_before_a_step_and_nan_where_nobody_owns_a_token() -> None:
    schedule, step = first_step(DECODE.format(""))
    before, after = (index_memory(schedule, step, after=each) for each in (False, True))
    owned = np.concatenate([request.slots[: request.prefix] for request in step.requests])
    finite = scales_of(before[0]).flatten().isfinite().nonzero()[:, 0]
    assert sorted(owned.tolist()) == finite.tolist()
    new = [int(request.slots[request.prefix]) for request in step.requests]
    changed = (keys_of(after[0]).view(torch.uint8) != keys_of(before[0]).view(torch.uint8)).flatten(0, 1).any(-1)
    assert sorted(new) == changed.nonzero()[:, 0].tolist()


# What is right.


def test_the_answer_attends_the_keys_of_the_best_scores() -> None:
    schedule, step = first_step(VERIFY.format(""))
    data = make_sparse_data(schedule, step)
    assert data.selected is not None
    assert bool((data.selected == -1).all()), "what is right is not among the inputs"
    assert isinstance(data.index, IndexData)
    keys = best_keys(schedule, data, data.index)
    assert bool((keys >= 0).any())
    dense = answer(make_schedule(parse_case(VERIFY.format("").replace("sel16", "sel64"))), data, False)
    assert bool(((answer(schedule, data, False).out - dense.out).abs() > dense.limit).any())


def test_a_layer_that_reuses_a_selection_attends_that_of_the_layer_before() -> None:
    schedule, step = first_step(DECODE.format("reuse"))
    data = make_sparse_data(schedule, step)
    assert isinstance(data.index, IndexData)
    keys = best_keys(schedule, data, data.index)
    assert torch.equal(keys[0], keys[1])
    assert [layer.reuses_selection for layer in make_layers(schedule.case)] == [False, True]
    assert index_memory(schedule, step, after=False).shape[0] == 1


def test_several_layers_use_a_selection_and_the_one_after_them_selects() -> None:
    case = parse_case(DECODE.replace("idx4{}-b4prod", "idx4reuse3-layers5from0-b2prod"))
    assert [layer.reuses_selection for layer in make_layers(case)] == [False, True, True, False, True]
    with pytest.raises(ValueError, match="cannot share one: leave out reuse or ties"):
        parse_case(DECODE.format("reuse4ties"))


def test_later_forwards_of_a_draft_use_what_the_first_selected_and_store_no_index_keys() -> None:
    for kind, stored in (("", 3), ("first", 1)):
        schedule, step = first_step(DRAFT.format(kind))
        data, (request, _) = make_sparse_data(schedule, step), step.requests
        keys = best_keys(schedule, data, data.index)[0, :3]
        assert len({tuple(sorted(row)) for row in keys.tolist()}) == stored
        before, after = (index_memory(schedule, step, after=each) for each in (False, True))
        assert int((before != after).view(2, -1, 64 * 132)[0].any()) == 1
        new = request.slots[request.prefix :]
        scales = scales_of(after[0]).flatten()[new]
        assert int(scales.isfinite().sum()) == stored
    assert int(keys.max()) <= request.prefix, "no token that the draft adds after its first is attended to"


def test_a_pair_is_wrong_only_beyond_both_margins() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    taken = torch.tensor([True, False, True])
    for margin, want in ((0.49, (0, 1)), (0.5, None), (0.0, (0, 1))):
        each = RowScores(0, 0, scores, torch.full_like(scores, margin))
        assert consistent(each, taken) == want
    assert consistent(RowScores(0, 0, scores, scores * 0), ~taken) == (1, 2)
    assert consistent(RowScores(0, 0, torch.ones(3).double(), torch.zeros(3).double()), taken) is None, "a tie"


# What the checks find.

STORED, FORM, BEST = "index-stored", "selection-well-formed", "selects-best"


@pytest.mark.parametrize(
    ("backend", "kind", "check", "where", "hint"),
    [
        (
            faults.IndexScalesOfFirstLayer,
            "",
            STORED,
            "layer 0, request 0, row 0, token at position 100",
            "share a view",
        ),
        (faults.IndexPageWrittenByToken, "", STORED, "slot", "written token by token"),
        (faults.IndexScaleNotAPowerOfTwo, "pow2gauss", STORED, "the scale is", "powers of two are declared"),
        (faults.IndexSlotTakenForPage, "", STORED, "the scale is nan", ""),
        (faults.IndexerRowsAndLengthsDiffer, "", FORM, "layer 0, request 1, row 0, token at position 37", ""),
        (faults.IndexerTopkAndLengthExchanged, "", BEST, "the row may see 101 keys", "are exchanged"),
        (faults.IndexerScoresAreZero, "", BEST, "layer 0, request 0", "the last 16 keys"),
        (faults.IndexerWithoutRelu, "", BEST, "", "ReLU is left out"),
        (faults.IndexPageReadByToken, "", BEST, "", "read token by token"),
        (faults.IndexerKeyScaleDropped, "", BEST, "", "scales of the keys are left out"),
        (faults.IndexScalesOfFirstLayerRead, "", BEST, "layer 1", "those of the first layer"),
        (faults.SelectionOfTheLayerBefore, "", BEST, "layer 1", "of the layer before"),
        (faults.IndexerScoresBeforeTheStore, "", BEST, "", "not selected"),
        (faults.IndexerGatesWithoutSign, "gauss", BEST, "", ""),
    ],
)
def test_a_check_names_the_place_and_the_mistake(backend, kind: str, check: str, where: str, hint: str) -> None:
    found = findings(backend, DECODE.format(kind))
    assert found[0].check == check
    assert {finding.check for finding in found} <= {STORED, FORM, BEST}, "wrong attention follows, and is not reported"
    assert where in found[0].where
    assert hint in found[0].hint


def test_a_replay_with_the_lengths_of_the_capture_is_named() -> None:
    found = findings(faults.IndexerLengthOfTheCapture, DECODE.format(""), "graph")
    assert found[0].check == FORM
    assert "of the capture" in found[0].hint


def test_padded_rows_that_are_stored_elsewhere_are_found() -> None:
    found = findings(faults.IndexKeysOfPaddingStored, DECODE.format(""), "graph")
    assert found[0].check == STORED
    assert "of no live request" in found[0].where


def test_the_attention_of_exact_data_has_the_selection_of_the_backend() -> None:
    assert findings(faults.SelectionBufferOfAllLayers, DECODE.format(""))[0].check == "matches-oracle"
    found = findings(faults.SelectionReusedFromTheStepBefore, DECODE.format("reuse"))
    assert found[0].check == "steps-independent"


OF_FOUR_LAYERS = DECODE.replace("idx4{}-b4prod", "idx4reuse4-layers6from3-b2prod")
OF_TWO_BATCHES = DECODE.replace("k100.37", "k9.70.1.33").replace("idx4{}-b4prod", "idx4reuse-b4prod-two_batch_overlap")


@pytest.mark.parametrize(
    ("backend", "case_id", "layer", "hint"),
    [
        (shared.SharedSelectionIsNotHandedOn, OF_FOUR_LAYERS, "layer 6", "does not hand it on"),
        (shared.SharedSelectionOfTheOtherBatch, OF_TWO_BATCHES, "layer 1", "without two-batch overlap"),
        (shared.SharedSelectionIsLookedUpTwice, DECODE.format("reuse"), "layer 1", "only layers that use"),
    ],
)
def test_a_hint_says_which_layers_of_a_shared_selection_are_wrong(backend, case_id: str, layer: str, hint: str) -> None:
    found = findings(backend, case_id)[0]
    assert f"out[{layer}, " in found.where
    assert hint in found.hint
    assert not findings(shared.SelectionInABuffer, case_id)


@pytest.mark.parametrize(
    ("backend", "kind", "check", "hint"),
    [
        (drafts.DraftSelectionIsNotCompacted, "first", "matches-oracle", "only later forwards"),
        (drafts.DraftSelectionIsCleared, "first", "matches-oracle", "only later forwards"),
        (drafts.DraftIndexerOfTheFirstLengths, "", BEST, "planned once per draft"),
        (drafts.DraftIndexKeysInSlotsOfAllForwards, "", STORED, ""),
    ],
)
def test_drafts_that_select_are_judged(backend, kind: str, check: str, hint: str) -> None:
    found = findings(backend, DRAFT.format(kind))[0]
    assert found.check == check
    assert hint in found.hint


@pytest.mark.parametrize(
    ("backend", "kind"),
    [(drafts.DraftIndexer, ""), (drafts.DraftIndexer, "first"), (TorchNativeSparseBackend, "reusefirst")],
)
def test_a_right_indexer_of_a_draft_passes(backend, kind: str) -> None:
    assert not findings(backend, DRAFT.format(kind))


@pytest.mark.parametrize(
    ("backend", "case_id"),
    [
        (IndexerParent, EXTEND.format("gauss")),
        (IndexerParent, DECODE.format("reuse")),
        (IndexerUnsorted, VERIFY.format("")),
        (IndexerOneBuffer, DECODE.format("ties")),
        (IndexerPowerOfTwoScales, DECODE.format("pow2gauss").replace("sel16", "sel16slots")),
        (TorchNativeSparseBackend, V2.format("")),
        (IndexerFused, EXTEND.format("fused")),
    ],
)
@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_a_right_indexer_passes(backend, case_id: str, execution: str) -> None:
    assert not findings(backend, case_id, execution)


def test_a_fused_indexer_is_judged_by_its_attention_and_its_pool() -> None:
    found = findings(faults.FusedIndexerScoresAreZero, DECODE.format("fused"))
    assert found[0].check == "matches-oracle"
    assert "the first 16 keys are attended" in found[0].hint
    short = "decode-mqa4-d64-bf16-p16-k15.16.17-contiguous-mean-sel16-idx4fused-b6small"
    assert findings(faults.FusedIndexerStoresAfterItReads, short)[0].check == "matches-oracle"


# What a backend declares.


def test_cases_have_what_is_declared() -> None:
    declared = TorchNativeSparseBackend.capabilities
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
        cases = generate(declared, mode, "core")
        assert {str(case.indexer) for case in cases} >= {"None", "idx4", "idx4reuse", "idx4ties", "idx4gauss", "idx64"}
    cases = generate(declared, ForwardMode.DRAFT_DECODE, "core")
    assert {str(case.indexer) for case in cases} >= {"None", "idx4", "idx4first", "idx4reuse", "idx4ties", "idx4gauss"}
    assert {case.draft.branches for case in cases if case.indexer} == {1}
    fused = generate(IndexerFused.capabilities, ForwardMode.DECODE, "core")
    assert {str(case.indexer) for case in fused} == {"idx4fused"}


def test_a_wrong_declaration_is_refused() -> None:
    with pytest.raises(ValueError, match="write Indexer"):
        Sparse(topk={16}, indexer={"heads": 4})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one or more whole numbers"):
        Indexer(heads=set())
    with pytest.raises(ValueError, match="did you mean 'power_of_two'"):
        Indexer(heads={4}, scale="power_of_2")
    with pytest.raises(ValueError, match="unknown drafts 'last'"):
        Indexer(heads={4}, drafts={"last"})
    with pytest.raises(ValueError, match="drafts excludes fused"):
        Indexer(heads={4}, drafts={"first"}, fused=True)
    with pytest.raises(ValueError, match="servers with an indexer draft chains"):
        parse_case(DRAFT.format("").replace("topk1", "topk2"))
    with pytest.raises(ValueError, match="cannot share one: leave out first or ties"):
        parse_case(DRAFT.format("firstties"))
    with pytest.raises(ValueError, match="add a word such as sel16"):
        parse_case("decode-mqa4-d64-bf16-p16-k9-shuffled-gauss-idx4-b1prod")


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_an_indexer_selects_for_attention_that_returns_a_log_sum_exp(execution: str) -> None:
    case_id = "decode-mqa4-d64-bf16-p16-k100.37-shuffled-gauss-sel16-idx4-lsewhole-b4prod"
    assert not findings(TorchNativeSparseBackend, case_id, execution)


def test_a_fused_indexer_has_no_log_sum_exp() -> None:
    with pytest.raises(ValueError, match="lse with a fused indexer"):
        IndexerFused.capabilities.with_changes(lse=LogSumExp("e", whole={"decode"}))
