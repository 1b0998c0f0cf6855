"""Cases of memory that another instance hands over: their word, what they exclude, and which a tier has."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_handed import TorchNativeHandedBackend
from attn_testkit.backends.torch_native_state_handed import TorchNativeStateHandedBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.handed import HANDED, Handed, handed_of, state_key_heads
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode, Receives, heads_of_rank

MAMBA = "decode-mamba{}-d32-bf16-p16-k5-shuffled-mild_decay-k32w4s32-handed{}p16nhd-b1prod"
CASE = "decode-gqa4x2-d64-bf16-p16-k40.9-shuffled-gauss-{}-b3prod"


@pytest.mark.parametrize(
    ("ranks", "heads", "of_ranks"),
    [(2, 4, [[0, 1], [2, 3]]), (4, 2, [[0], [0], [1], [1]]), (1, 3, [[0, 1, 2]]), (3, 1, [[0], [0], [0]])],
)
def test_a_rank_has_consecutive_heads_or_shares_one(ranks: int, heads: int, of_ranks: list[list[int]]) -> None:
    assert [[*heads_of_rank(rank, ranks, heads)] for rank in range(ranks)] == of_ranks


def test_a_word_says_who_hands_over() -> None:
    case = parse_case(CASE.format("handed2to4p8kvinblock"))
    assert case.id == CASE.format("handed2to4p8kvinblock")
    assert handed_of(case) == Handed(2, 4, 0, 8, "kv-in-block")
    assert HANDED.describe(case) == {  # type: ignore[operator]
        "handed": "2 tensor-parallel ranks hand the requests over to one of 4, from pages of 8 in the layout "
        "kv-in-block"
    }


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (CASE.format("handed0to4p8nhd"), "number of the sender's ranks is 0; expected 1 to 64"),
        (CASE.format("handed2to4"), "cannot read 'handed2to4'"),
        (CASE.format("handed3to4p8nhd"), "2 KV heads on a rank cannot be divided like this"),
        (CASE.format("handed1to4k2p8nhd"), "2 KV heads on a rank cannot be divided like this"),
        (CASE.format("handed2to2p8nhd").replace("gqa4x2-d64", "mla4-d64r64"), "same latent rows, so write k1"),
        (CASE.format("lsewhole-handed2to4p8nhd"), "KV splits"),
        (
            "decode-gdn1x2-d32-bf16-p16-k5-shuffled-weak_decay-k32w4s32-handed8to1p16nhd-b1prod",
            "cannot be divided among as many ranks",
        ),
        (MAMBA.format("2x1", "3to4k2"), "cannot be divided among as many ranks"),
        (MAMBA.format("2x2", "1to4k2"), "cannot be divided among as many ranks"),
        (MAMBA.format("1x2", "4to1k2"), "cannot be divided among as many ranks"),
        (MAMBA.format("2x1", "1to4k2").replace("mamba", "gdn").replace("1to4", "8to4"), "cannot be divided"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(case: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_case(case)


@pytest.mark.parametrize(
    ("heads", "ranks", "of_model"),
    [("mamba2x1", "1to4k2", 2), ("mamba2x2", "4to1k2", 2), ("mamba2x1", "1to4", 4), ("gdn2x1", "1to4k2", 4)],
)
def test_ranks_share_groups_of_mamba_and_no_key_head_of_other_kinds(heads: str, ranks: str, of_model: int) -> None:
    case = parse_case(MAMBA.format("2x1", ranks).replace("mamba2x1", heads))
    handed = handed_of(case)
    assert handed is not None
    assert state_key_heads(case, handed) == of_model


def test_core_shares_groups_here_and_at_the_sender_and_receives_on_a_rank_of_the_second_group() -> None:
    cases = generate(TorchNativeStateHandedBackend.capabilities, ForwardMode.DECODE, "core")
    found = [(case.heads.family, handed, case) for case in cases if (handed := handed_of(case)) and handed.heads]
    assert {(family, handed.senders, handed.ranks) for family, handed, _ in found} == {
        ("gdn", 1, 4), ("mamba", 1, 4), ("mamba", 4, 1)
    }  # fmt: skip
    assert all(case.derived("receiving-rank", each.ranks) == each.ranks // 2 for _, each, case in found)


def test_core_tries_each_kind_of_ranks_with_each_page() -> None:
    declared = TorchNativeHandedBackend.capabilities
    found = [handed for case in generate(declared, ForwardMode.DECODE, "core") if (handed := handed_of(case))]
    receives = declared.receives
    assert receives is not None
    assert {(each.compared, each.page) for each in found} == {
        (kind, page) for kind in receives.ranks for page in receives.page_sizes
    }
    assert {each.layout for each in found} == receives.kv_layouts
    assert any(each.heads > 1 for each in found), "heads that ranks share"
    assert not any(case.handed for case in generate(TorchNativeBackend.capabilities, ForwardMode.DECODE, "smoke"))


def test_a_declaration_is_checked() -> None:
    with pytest.raises(ValueError, match="unknown ranks 'fewest'; did you mean 'fewer'"):
        Receives({16}, ranks={"fewest"})
    with pytest.raises(ValueError, match=r"Receives\.page_sizes is empty"):
        Receives(set())
    with pytest.raises(ValueError, match="unknown kv_layouts 'custom'"):
        Receives({16}, kv_layouts={"custom"})
    with pytest.raises(ValueError, match="must be a Receives"):
        TorchNativeBackend.capabilities.with_changes(receives=16)
