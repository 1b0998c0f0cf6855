"""Ranks with pools of their own: which keys each has, which cases a capability gives, and what their words say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_ranks import TorchNativeRanksBackend
from attn_testkit.backends.torch_native_sparse_ranks import TorchNativeSparseRanksBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.features.kv_splits import KV_SPLITS, has_own_pools, splits_of
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode, Indexer, KVSplit, LogSumExp, Sparse

ALL = TorchNativeRanksBackend.capabilities
MODES = sorted(set(ForwardMode) - {ForwardMode.DRAFT_DECODE})
CASE = "decode-gqa3x2-d64-bf16-p4-k9.0.6-shuffled-gauss-{}-b3prod"


def core(mode: ForwardMode) -> list[Case]:
    return [case for case in generate(ALL, mode, "core") if has_own_pools(case)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("interleave", [1, 2, 4, 5, 64])
def test_each_key_is_on_one_rank_and_its_local_index_counts_the_keys_there(ranks: int, interleave: int) -> None:
    for count in (0, 1, interleave, interleave * ranks - 1, interleave * ranks, 3 * interleave * ranks + 1):
        key, zero, seen = torch.arange(count), torch.tensor(0), list[int]()
        for rank in range(ranks):
            split = KVSplit("rank", rank, ranks, interleave, own_pool=True)
            held = key[split.holds(key, zero)]
            seen += held.tolist()
            assert int(split.lens(torch.tensor(count), zero)) == len(held)
            assert split.index(held).tolist() == list(range(len(held)))
            assert split.key(torch.arange(len(held)), zero).tolist() == held.tolist()
        assert sorted(seen) == key.tolist()


def test_a_word_says_how_many_ranks_and_how_many_tokens_each_gets() -> None:
    case = parse_case(CASE.format("ranks3by2"))
    assert case.id == CASE.format("ranks3by2")
    assert [(each.rank, each.ranks, each.interleave, each.own_pool) for each in splits_of(case)] == [
        (rank, 3, 2, True) for rank in range(3)
    ]
    assert [each.sinks for each in splits_of(case)] == [True, False, False]
    assert KV_SPLITS.describe(case) == {
        "kv_splits": "3 ranks, each with its own pool, request table and log-sum-exp; "
        "they get 2 tokens of a request at a time; merged by the kit"
    }
    assert parse_case(CASE.format("ranks8by64merged")).merged_by_backend
    assert not has_own_pools(parse_case(CASE.format("lsetokens3")))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("ranks1by2", "number of ranks is 1; expected 2 to 64"),
        ("ranks2by0", "consecutive tokens on a rank is 0; expected 1 to 65536"),
        ("ranks2", "cannot read 'ranks2'"),
        ("lseranks2by2", "cannot read 'lseranks2by2'"),
    ],
)
def test_a_word_that_cannot_be_is_refused(word: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_case(CASE.format(word))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("decode-gqa3x2-d64-bf16-p4-k9.8-shared-gauss-ranks2by4-b3prod", "shared prefixes"),
        ("decode-gqa3x2-d64-bf16-p4-k9.8-shuffled-gauss-ranks2by4-b3prod-bigpool", "bigpool"),
        ("decode-gqa3x2-d64-bf16-p4-k9-shuffled-gauss-ranks2by4-b2prod-multi_mode", "multi-mode instance"),
        ("draft-decode-gqa3x2-d64-bf16-p4-k9-topk2steps3-shuffled-gauss-ranks2by4-b2prod", "draft-decode"),
    ],
)
def test_ranks_exclude_what_their_pools_cannot_hold(case: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_case(case)


@pytest.mark.parametrize("mode", MODES)
def test_core_tries_each_number_of_ranks_and_interleaves_of_tokens_pages_and_between(mode: ForwardMode) -> None:
    tried = {(split.ranks, split.interleave, case.page_size) for case in core(mode) for split in splits_of(case)}
    assert {ranks for ranks, _, _ in tried} == {2, 3, 4, 8}
    assert {"token" if size == 1 else "page" if size == page else "other" for _, size, page in tried} == {
        "token",
        "page",
        "other",
    }
    assert any(page % size and size % page for _, size, page in tried), "an interleave that does not divide a page"


@pytest.mark.parametrize("mode", MODES)
def test_core_has_requests_with_fewer_keys_than_ranks_and_lengths_at_the_borders_of_ranks(mode: ForwardMode) -> None:
    lens = {(prefix, splits_of(case)[0]) for case in core(mode) for prefix in case.prefixes}
    assert any(prefix + case.most_new < len(splits_of(case)) for case in core(mode) for prefix in case.prefixes)
    turns = {(prefix - split.ranks * split.interleave) for prefix, split in lens}
    assert {-1, 0} <= turns
    assert any(prefix == split.interleave for prefix, split in lens)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode is not ForwardMode.DECODE])
def test_rows_of_one_request_are_on_several_ranks(mode: ForwardMode) -> None:
    assert any(len(_ranks_of_rows(case)) > 1 for case in core(mode))


def _ranks_of_rows(case: Case) -> set[int]:
    split, new = splits_of(case)[0], case.new or (case.width,) * case.bs
    return {
        key // split.interleave % split.ranks
        for prefix, count in zip(case.prefixes[:1], new, strict=False)
        for key in range(prefix, prefix + count)
    }


def test_core_counts_keys_and_has_both_families_of_heads_in_each_mode() -> None:
    for mode in MODES:
        cases = core(mode)
        assert any(case.data == "plus_minus_one" for case in cases)
        assert {case.heads.layout.wide_rows for case in cases} == {True, False}


@pytest.mark.parametrize("mode", MODES)
def test_a_backend_that_merges_does_so_in_some_cases_of_ranks_and_the_kit_in_the_others(mode: ForwardMode) -> None:
    merged = [case for case in core(mode) if case.merged_by_backend]
    assert {8, 3, 2} <= {len(splits_of(case)) for case in merged}
    assert any(case.data == "negative" for case in merged), "exponentials of bare log-sum-exps are 0"
    assert any(prefix + case.most_new <= splits_of(case)[0].interleave for case in merged for prefix in case.prefixes)
    assert {len(splits_of(case)) for case in core(mode) if not case.merged_by_backend} == {2, 3, 4}
    by_kit = ALL.with_changes(lse=LogSumExp("e", ranks=ALL.lse.ranks)) if ALL.lse else ALL
    assert not [case for case in generate(by_kit, mode, "core") if case.merged_by_backend]


def test_only_a_backend_that_can_be_a_rank_gets_such_cases() -> None:
    for mode in ForwardMode:
        cases = [case for tier in ("smoke", "core") for case in generate(TorchNativeBackend.capabilities, mode, tier)]
        assert not [case.id for case in cases if has_own_pools(case)]
    declared = ALL.with_changes(lse=LogSumExp("e", ranks={"decode"}))
    assert {mode for mode in MODES for case in generate(declared, mode, "core") if has_own_pools(case)} == {
        ForwardMode.DECODE
    }


def test_a_backend_that_needs_finite_page_tails_is_no_rank_because_ranks_poison_them() -> None:
    declared = ALL.with_changes(needs={"finite_page_tails": {"same"}})
    assert {case.kv_dtype for case in generate(declared, ForwardMode.DECODE, "core") if has_own_pools(case)} <= {
        "fp8_e4m3"
    }


@pytest.mark.parametrize("seed", range(4))
def test_cases_exist_whatever_else_is_declared(seed: int) -> None:
    """The smallest case of a backend may have shared prefixes, which ranks exclude."""
    everything = TorchNativeBackend.capabilities.with_changes(lse=ALL.lse)
    few = everything.with_changes(kv_pool={"page_sizes": {1, 16}}, heads={"head_dims": {64, 128}})
    for declared in (everything, few):
        for mode in MODES:
            for tier in ("smoke", "core"):
                assert [case for case in generate(declared, mode, tier, seed) if has_own_pools(case)]


SELECTED = TorchNativeSparseRanksBackend.capabilities


@pytest.mark.parametrize("mode", MODES)
def test_ranks_have_selected_keys_which_leave_out_keys_of_a_rank(mode: ForwardMode) -> None:
    cases = [case for case in generate(SELECTED, mode, "core") if has_own_pools(case)]
    assert all(case.selection for case in cases)
    assert {len(splits_of(case)) for case in cases} == {2, 3, 4, 8}
    assert any(case.selection and max(case.prefixes) > 4 * case.selection.topk > 4 for case in cases)
    assert any(case.selection and case.selection.empty_rows for case in cases)
    assert any(case.data == "plus_minus_one" for case in cases)
    assert all(len(splits_of(case)) == 3 for case in cases if case.indexer), "the covering array, and one case"
    assert any(case.indexer for case in cases) is (mode is not ForwardMode.DRAFT_DECODE)


def test_only_an_indexer_that_is_replicated_is_on_ranks() -> None:
    declared = SELECTED.with_changes(sparse={"indexer": Indexer(heads={4})})
    for mode in MODES:
        cases = generate(declared, mode, "core")
        assert any(case.indexer for case in cases)
        assert not [case.id for case in cases if case.indexer and has_own_pools(case)]


def test_selections_of_slots_and_ranks_are_not_declared_together() -> None:
    with pytest.raises(ValueError, match=r"sparse and lse\.ranks with index_space='slots'"):
        SELECTED.with_changes(sparse=Sparse(topk={16}, index_space="slots"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sel16slots-ranks2by4", "a slot is of the pool of one rank"),
        ("sel16-lsetokens2", "a selection is made among all keys of a request"),
    ],
)
def test_a_selection_of_slots_and_splits_of_one_pool_are_excluded(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_case(f"decode-gqa3x2-d64-bf16-p4-k9.80-shuffled-gauss-{words}-b2prod")


def test_ranks_run_in_both_orders() -> None:
    assert {case.derived("rank-order") for mode in MODES for case in core(mode)} == {0, 1}


def _smaller(case: Case) -> Iterator[str]:
    minimal = parse_case(CASE.format("lsewhole"))
    assert KV_SPLITS.simpler is not None
    for changes in KV_SPLITS.simpler.steps(ALL, case, minimal):
        yield case.with_changes(**changes).kv_splits


def test_minimize_takes_fewer_ranks_and_fewer_tokens() -> None:
    found = set(_smaller(parse_case(CASE.format("ranks8by5"))))
    assert {"ranks5by5", "ranks7by5", "ranks8by3", "ranks8by4"} <= found
