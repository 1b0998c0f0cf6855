"""Indexers where a covering array brings them by chance: many ties, server variants, and scores beyond 2^31 bytes."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend, TorchNativeSparseSlotsBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.features.server.table import variant_of
from attn_testkit.cases.features.server.wide_scores import wide_scores_cases
from attn_testkit.cases.indexing import NEAR
from attn_testkit.catalogue.large_cases import too_large_for_a_cpu
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import AttentionBackend, Capabilities, ForwardMode, Indexer, Sparse
from attn_testkit.families.sparse.data import make_sparse_data
from attn_testkit.families.sparse.index_scores import row_scores, stored_index
from attn_testkit.steps.index_data import make_index_data
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.indexer import FusedIndexer, IndexerOfPrefixes, IndexerParent

DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY
WITH_INDEXER = sorted(set(ForwardMode) - {ForwardMode.DRAFT_DECODE})
GIVEN = {"bigpool"}
"""Variants whose case with an indexer is another one."""


def of_width(*topk: int, **indexer: object) -> Capabilities:
    return IndexerParent.capabilities.with_changes(sparse=Sparse(topk=set(topk), indexer=Indexer({4}, **indexer)))


def many_ties(declared: Capabilities, mode: ForwardMode) -> list[Case]:
    found = [case for case in generate(declared, mode, "core") if case.indexer and case.indexer.data == "ties"]
    return [case for case in found if case.prefixes == (10 * case.selection.topk, 70)]


def wide(declared: Capabilities, mode: ForwardMode) -> list[Case]:
    return [case for case in generate(declared, mode, "core") if "wide_scores" in case.variants]


# Ties.


def test_more_keys_tie_at_the_end_of_a_selection_than_it_has_and_few_are_better() -> None:
    topk = 256
    (case,) = many_ties(of_width(16, topk), DECODE)
    schedule, better = make_schedule(case), []
    for step in schedule.steps[:5]:
        data, index = make_sparse_data(schedule, step), make_index_data(schedule, step)
        for each in row_scores(data, index, 0, *stored_index(index.by_slot[0], "amax")):
            if len(each.scores) <= 10 * topk:
                continue
            last = each.scores.sort(descending=True).values[topk - 1]
            better.append(int((each.scores > last).sum()))
            assert int((each.scores == last).sum()) > topk
            assert better[-1] < 16
    assert max(better) > 0, "some rows have winners"


@pytest.mark.parametrize("mode", list(ForwardMode))
def test_each_width_of_decode_and_extend_has_more_ties_than_a_buffer_of_candidates(mode: ForwardMode) -> None:
    found = [case for case in generate(of_width(1, 16, 255, 256), mode, "core") if case.prefixes[1:] == (70,)]
    keys = {case.selection.topk: case.prefixes[0] for case in found if case.indexer and case.indexer.data == "ties"}
    assert keys == ({16: 66_000, 255: 66_000, 256: 2560} if mode in (DECODE, EXTEND) else {})


def test_an_indexer_inside_forward_has_no_ties() -> None:
    assert not [c for c in generate(FusedIndexer.capabilities, DECODE, "core") if c.indexer and c.indexer.data]


@pytest.mark.parametrize(
    "case",
    [
        "extend-mqa4-d32-bf16-p16-k0x3-n8a20.1.3-reversed-gauss-sel16-idx4-b3prod-noncausal",
        "extend-mqa4-d32-bf16-p16-k0x3-n8a20.1.3-reversed-gauss-sel16-idx4-b3prod",
    ],
)
def test_exact_scores_have_one_best_selection_of_the_keys_that_a_row_sees(case: str) -> None:
    schedule, checked = make_schedule(parse_case(case)), 0
    for step in schedule.steps:
        data, index = make_sparse_data(schedule, step), make_index_data(schedule, step)
        for layer in range(schedule.case.layers.count):
            for each in row_scores(data, index, layer, *stored_index(index.by_slot[layer], "amax")):
                if len(each.scores) > 16:
                    best = each.scores.sort(descending=True).values
                    assert best[15] > best[16]
                    checked += 1
    assert checked


# Scores near each other.


def near_cases(declared: Capabilities, mode: ForwardMode) -> list[Case]:
    return [case for case in generate(declared, mode, "core") if case.indexer and case.indexer.data == NEAR]


@pytest.mark.parametrize("mode", [DECODE, EXTEND])
@pytest.mark.parametrize("topk", [16, 128, 256])
def test_more_scores_than_a_bin_keeps_are_near_the_last_selected_one_and_the_best_are_anywhere(
    mode: ForwardMode, topk: int
) -> None:
    (case,) = near_cases(of_width(1, topk), mode)
    schedule = make_schedule(case)
    step = schedule.steps[0]
    data, index = make_sparse_data(schedule, step), make_index_data(schedule, step)
    long = [each for each in row_scores(data, index, 0, *stored_index(index.by_slot[0], "amax")) if each.request == 0]
    assert len(long) == (34 if mode is EXTEND else 1)
    for each in long:
        last = each.scores.sort(descending=True).values[topk - 1]
        assert int(((each.scores / last - 1).abs() < 0.1).sum()) > 16_384
        late = int((each.scores[16_384:] > last).sum())
        assert late > (topk // 12 if topk > 16 else 0), "a bin with room for the first ones loses these"


@pytest.mark.parametrize("heads", [4, 64])
@pytest.mark.parametrize("seed", range(1, 3))
def test_the_only_row_of_a_decode_overflows_a_bin_whatever_is_drawn(seed: int, heads: int) -> None:
    declared = IndexerParent.capabilities.with_changes(sparse=Sparse(topk={64}, indexer=Indexer({heads})))
    (case,) = near_cases(declared, DECODE)
    schedule = make_schedule(case.with_seed(seed))
    for step in (schedule.steps[0], schedule.second):
        data, index = make_sparse_data(schedule, step), make_index_data(schedule, step)
        rows = row_scores(data, index, 0, *stored_index(index.by_slot[0], "amax"))
        for each in (each for each in rows if len(each.scores) > 20_000):
            # Sign, exponent and three bits of the mantissa, as in the first pass over float32.
            bins = each.scores.float().view(torch.int32) >> 20
            assert int(bins.unique(return_counts=True)[1].max()) > 16_384
            best = each.scores.sort(descending=True).indices[:64]
            assert int(best.min()) < 4_096, "one that a bin loses which keeps the last ones"
            assert int(best.max()) >= 16_384, "one that a bin loses which keeps the first ones"


@pytest.mark.parametrize("mode", [DECODE, EXTEND])
def test_each_width_has_such_scores(mode: ForwardMode) -> None:
    found = near_cases(of_width(1, 64, 128, 2048), mode)
    assert sorted(case.selection.topk for case in found if case.selection) == [64, 128, 2048]
    assert near_cases(of_width(1), mode)


# Server variants.


@pytest.mark.parametrize(
    "backend", [IndexerOfPrefixes, TorchNativeSparseBackend, TorchNativeSparseSlotsBackend, FusedIndexer]
)
@pytest.mark.parametrize("mode", WITH_INDEXER)
def test_each_server_variant_of_a_mode_has_a_case_with_an_indexer(
    backend: type[AttentionBackend], mode: ForwardMode
) -> None:
    declared = backend.capabilities
    cases = generate(declared, mode, "core")
    words = {word for case in cases for word in case.variants} - GIVEN
    assert words == {word for case in cases if case.indexer for word in case.variants} - GIVEN
    if mode.is_speculative() and "prefix" in declared.server.context_len:
        assert "context_of_prefixes" in words


def test_without_an_indexer_and_in_draft_decode_nothing_is_added() -> None:
    given = IndexerParent.capabilities.with_changes(sparse=Sparse(topk={16, 256}))
    assert not any(case.indexer for mode in ForwardMode for case in generate(given, mode, "core"))
    of_targets = TorchNativeSparseBackend.capabilities.with_changes(sparse={"indexer": Indexer({4, 64})})
    assert not any(case.indexer for case in generate(of_targets, ForwardMode.DRAFT_DECODE, "core"))


# Scores beyond 2^31 bytes.


def test_eight_rows_of_a_prompt_begin_behind_two_gibibytes_of_scores() -> None:
    (case,) = wide(of_width(16), EXTEND)
    assert case.context_len == 1 << 20
    assert (sum(case.new) - 8) * case.context_len * 4 == 1 << 31
    assert max(case.prefixes) < 100, "few columns are in use"
    assert case.indexer is not None
    assert case.indexer.is_exact
    assert not too_large_for_a_cpu(case)
    schedule = make_schedule(case)
    assert schedule.max_context_len == 1 << 20
    assert len(schedule.steps) == 3


def test_in_full_drafts_to_verify_have_them_where_a_device_is_real() -> None:
    declared = of_width(16)
    small = {mode: generate(declared, mode, "smoke")[0] for mode in ForwardMode}
    for tier, modes in (("core", {EXTEND}), ("full", {EXTEND, VERIFY})):
        found = {mode: list(wide_scores_cases(declared, case, tier)) for mode, case in small.items()}
        assert {mode: len(cases) for mode, cases in found.items()} == {mode: mode in modes for mode in ForwardMode}
    (case,) = found[VERIFY]
    assert case.bs * case.width >= 520 > (case.bs - 1) * case.width
    assert case.prefixes[-1] == 2 * 16 + 9, "the last request, whose rows are the last, leaves keys out"
    assert too_large_for_a_cpu(case)


@pytest.mark.parametrize(("rows", "requests"), [(1 << 20, 1), (520, 1), (519, 2), (4, 130), (3, 0)])
def test_a_prompt_of_few_rows_is_several_and_a_table_of_very_many_is_not_made(rows: int, requests: int) -> None:
    found = wide(of_width(16).with_changes(bounds={"max_extend_tokens": rows}), EXTEND)
    assert [case.bs for case in found] == [requests] * bool(requests)


def test_a_context_of_less_than_a_million_has_none() -> None:
    for most, count in ((1 << 20, 1), ((1 << 20) - 1, 0)):
        assert len(wide(of_width(16).with_changes(bounds={"max_context_len": most}), EXTEND)) == count


def test_the_variant_says_what_it_is() -> None:
    (case,) = wide(of_width(16), EXTEND)
    assert "more than 2^31 bytes" in variant_of(case).about
    assert len(wide(of_width(16, fused=True), EXTEND)) == 1
