"""Prompts whose rows are dealt: which rows each rank has, which cases a capability gives, and what their words say."""

from __future__ import annotations

import pytest
import torch
from attn_testkit.runner_modes.harness import ServerHarness

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_pcp import TorchNativePcpBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.backends.torch_native_state_pcp import TorchNativeStatePcpBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.features.row_ranks import ROW_RANKS, ranks_have_no_order, row_splits_of
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ROW_ORDERS, Capabilities, ForwardMode, PrefillRanks, RowSplit
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.with_row_ranks import RankOfAllModesBackend

CASE = "extend-gqa3x2-d64-bf16-p4-k9.0-n11a7.4-shuffled-gauss-{}-b2prod"
STATES = "extend-gdn2x2-d32-bf16-p16-k0.40-n68a65.3-shuffled-mild_decay-k32w4s32-{}-b2prod"


def dealt(declared: Capabilities, tier: str) -> list[Case]:
    return [case for case in generate(declared, ForwardMode.EXTEND, tier) if case.row_ranks]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("order", ROW_ORDERS)
def test_each_row_is_on_one_rank_and_rows_of_a_rank_ascend(ranks: int, order: str) -> None:
    for count in (1, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 7 * ranks + 3):
        new, row, seen = torch.tensor(count), torch.arange(count), list[int]()
        for rank in range(ranks):
            split = RowSplit(order, rank, ranks)
            held = row[split.holds(row, new)]
            seen += held.tolist()
            assert int(split.lens(new)) == len(held)
            assert split.row(torch.arange(len(held)), new).tolist() == held.tolist()
            assert not split.holds(torch.tensor([-1, count]), new).any()
        assert sorted(seen) == row.tolist()


def test_lengths_of_several_requests_are_computed_at_once() -> None:
    new = torch.tensor([7, 1, 12], dtype=torch.int32)
    assert RowSplit("zigzag", 0, 2).lens(new).tolist() == [3, 1, 6]
    assert RowSplit("zigzag", 1, 2).row(torch.arange(6)[None], new[:, None])[2].tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        ("zigzag", [[0, 1, 10], [2, 3, 8, 9], [4, 5, 6, 7]]),
        ("roundrobin", [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]),
        ("blocks", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
    ],
)
def test_the_first_blocks_have_the_rows_that_are_left_over(order: str, rows: list[list[int]]) -> None:
    new, every = torch.tensor(11), torch.arange(11)
    assert [every[RowSplit(order, rank, 3).holds(every, new)].tolist() for rank in range(3)] == rows


def test_a_word_says_how_many_ranks_and_how_rows_are_dealt() -> None:
    case = parse_case(CASE.format("pcp3zigzag"))
    assert case.id == CASE.format("pcp3zigzag")
    assert row_splits_of(case) == tuple(RowSplit("zigzag", rank, 3) for rank in range(3))
    assert ROW_RANKS.describe(case) == {  # type: ignore[operator]
        "row_ranks": "3 ranks, each with all keys; each has two blocks of consecutive rows, one from the start and "
        "one from the end"
    }
    assert ranks_have_no_order(case)
    assert not ranks_have_no_order(parse_case(STATES.format("pcp3blocks"))), "a state passes from rank to rank"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("pcp1zigzag", "number of ranks is 1; expected 2 to 64"),
        ("pcp3", "cannot read 'pcp3'"),
        ("pcp3spiral", "cannot read 'pcp3spiral'"),
    ],
)
def test_a_word_that_cannot_be_is_refused(word: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_case(CASE.format(word))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("decode-gqa3x2-d64-bf16-p4-k9.8-shuffled-gauss-pcp2zigzag-b3prod", "no prompts"),
        (CASE.format("lseprefix-pcp2zigzag"), "KV splits"),
        (CASE.format("pcp2zigzag") + "-empty_batches", "server variants"),
    ],
)
def test_dealt_rows_exclude_what_ranks_cannot_have(case: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_case(case)


@pytest.mark.parametrize("tier", ["smoke", "core"])
def test_a_tier_tries_each_declared_order_and_no_other(tier: str) -> None:
    found = {row_splits_of(case)[0].order for case in dealt(TorchNativePcpBackend.capabilities, tier)}
    assert found == set(ROW_ORDERS)
    few = TorchNativePcpBackend.capabilities.with_changes(prefill_ranks=PrefillRanks({"roundrobin"}))
    assert {row_splits_of(case)[0].order for case in dealt(few, tier)} == {"roundrobin"}
    assert not dealt(TorchNativeBackend.capabilities, tier)
    assert not dealt(TorchNativeStateBackend.capabilities, tier)


@pytest.mark.parametrize("declared", [TorchNativePcpBackend.capabilities, TorchNativeStatePcpBackend.capabilities])
def test_core_has_many_ranks_and_ranks_without_rows(declared: Capabilities) -> None:
    cases = dealt(declared, "core")
    assert {len(row_splits_of(case)) for case in cases} >= {2, 3, 8}
    assert any(max(case.new) < len(row_splits_of(case)) for case in cases), "a rank without any row"


def test_a_backend_of_states_deals_blocks_only() -> None:
    declared = TorchNativeStatePcpBackend.capabilities
    for ranks in (PrefillRanks({"zigzag"}), PrefillRanks({"blocks"}, gathers=True)):
        with pytest.raises(ValueError, match="a state passes from rank to rank"):
            declared.with_changes(prefill_ranks=ranks)


@pytest.mark.parametrize("tier", ["smoke", "core"])
def test_decodes_and_verifies_of_a_rank_have_each_declared_order(tier: str) -> None:
    """A verify was padded to a multiple of the ranks of prompts (sglang #34443)."""
    for orders in (set(ROW_ORDERS), {"blocks"}):
        declared = RankOfAllModesBackend.capabilities.with_changes(prefill_ranks={"orders": orders})
        for mode in declared.eager:
            cases = [case for case in generate(declared, mode, tier) if any("_rank" in word for word in case.variants)]
            found = {word.removesuffix("_rank") for case in cases for word in case.variants if "_rank" in word}
            assert found == (set() if mode is ForwardMode.EXTEND else orders)
            assert not any(case.multi_mode or case.row_ranks for case in cases)
            for case in cases[:3]:
                assert parse_case(case.id) == case
    alone = RankOfAllModesBackend.capabilities.with_changes(prefill_ranks={"gathers": True})
    assert not any("_rank" in case.id for case in generate(alone, ForwardMode.DECODE, tier)), "it needs other ranks"


def test_only_an_instance_of_such_a_case_is_a_rank() -> None:
    splits = []
    for word in ("", "-zigzag_rank"):
        case = parse_case(f"target-verify-gqa4x2-d64-bf16-p4-k9.70.1-chain4-shuffled-gauss-b3prod{word}")
        harness = ServerHarness(RankOfAllModesBackend, [make_schedule(case)], torch.device("cpu"))
        splits.append(harness.context.row_split)
    assert splits == [None, RowSplit("zigzag", 4, 5)]
    with pytest.raises(ValueError, match="rows of prompts are dealt"):
        parse_case(CASE.format("x").replace("-x", "") + "-zigzag_rank")


def test_orders_are_spelled_and_named() -> None:
    with pytest.raises(ValueError, match="unknown orders 'zigzak'; did you mean 'zigzag'"):
        PrefillRanks({"zigzak"})
    with pytest.raises(ValueError, match=r"PrefillRanks\.orders is empty"):
        PrefillRanks(set())
    with pytest.raises(ValueError, match="add 'extend' to eager"):
        TorchNativePcpBackend.capabilities.with_changes(eager={"decode"})
