"""Cases of more requests times heads, and of more rows, than a side of a CUDA grid holds; and of long contexts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_testkit.backends.flashinfer_mla import FlashInferMLABackend
from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, Heads
from attn_testkit.cases.catalogue import generate
from attn_testkit.cases.companions import many_heads
from attn_testkit.cases.large_cases import large_cases, too_large_for_a_cpu
from attn_testkit.contract import ForwardMode

GRID = 65_535
"""What CUDA's programming guide gives as the largest y and z of a grid."""
CLAIMS = TorchNativeBackend.capabilities
MLA = FlashInferMLABackend.capabilities


def beyond_a_grid(mode: ForwardMode, tier: str) -> list[Case]:
    return [case for case in generate(CLAIMS, mode, tier) if case.bs * case.heads.q_heads > GRID]


@pytest.mark.parametrize("mode", [mode for mode in ForwardMode if mode is not ForwardMode.DRAFT_EXTEND])
def test_requests_times_heads_are_just_more_than_a_grid_holds(mode: ForwardMode) -> None:
    assert len(beyond_a_grid(mode, "core")) == (mode is ForwardMode.DECODE)
    (case,) = beyond_a_grid(mode, "full")
    assert (case.bs - 1) * case.heads.q_heads <= GRID
    assert len(set(case.prefixes)) > 1
    assert not too_large_for_a_cpu(case)


@pytest.mark.parametrize("claims", [CLAIMS, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("mode", ForwardMode)
def test_full_has_a_context_of_131072_tokens_for_many_heads(mode: ForwardMode, claims: object) -> None:
    (case,) = [case for case in generate(claims, mode, "full") if max(case.prefixes) > 100_000]  # type: ignore[arg-type]
    assert 130_000 < max(case.prefixes) < 131_072
    assert case.heads.q_heads == 32
    assert case.data == "footprint", "with ordinary values nobody sees one key of so many"


def test_an_extend_of_more_rows_than_a_grid_holds_is_too_large_for_a_cpu() -> None:
    found = [case for case in generate(CLAIMS, ForwardMode.EXTEND, "full") if too_large_for_a_cpu(case)]
    (case,) = found
    rows = sum(case.new)
    assert GRID < rows <= GRID + case.new[0]
    fewer = replace(case, new=(*case.new[1:], 1), width=case.width)
    assert sum(fewer.new) == rows - case.new[0] + 1
    assert too_large_for_a_cpu(replace(case, new=(*case.new[:-1], case.new[0] - (rows - GRID - 1))))
    assert not too_large_for_a_cpu(replace(case, new=(*case.new[:-1], case.new[0] - (rows - GRID))))
    assert not any(map(too_large_for_a_cpu, generate(CLAIMS, ForwardMode.EXTEND, "core")))


def test_few_new_tokens_make_more_requests() -> None:
    few = CLAIMS.with_changes(max_extend_tokens=8)
    (case,) = [case for case in generate(few, ForwardMode.EXTEND, "full") if too_large_for_a_cpu(case)]
    assert set(case.new) == {8}


def test_draft_extend_is_tried_with_mla_where_that_is_claimed() -> None:
    assert not beyond_a_grid(ForwardMode.DRAFT_EXTEND, "full")


def test_rows_of_mla_are_not_compared_by_the_ten_thousand() -> None:
    (small, *_) = generate(MLA, ForwardMode.EXTEND, "core")
    assert [max(case.prefixes) > 100_000 for case in large_cases(MLA, "full", small)] == [True]
    assert not list(large_cases(MLA, "core", small))


@pytest.mark.parametrize(
    ("families", "ratios", "like", "most", "heads"),
    [
        ({"gqa"}, {2, 4}, Heads("gqa", 4, 2), 32, Heads("gqa", 32, 8)),
        ({"gqa"}, {16, 17, 128}, Heads("gqa", 4, 2), 128, Heads("gqa", 128, 8)),
        ({"gqa"}, {5}, Heads("gqa", 4, 2), 32, Heads("gqa", 30, 6)),
        ({"gqa"}, {32, 64}, Heads("gqa", 4, 2), 64, Heads("gqa", 64, 2)),
        ({"mha", "gqa"}, {1}, Heads("mha", 2, 2), 64, Heads("mha", 64, 64)),
        ({"mqa"}, {4, 8, 64}, Heads("mqa", 4, 1), 32, Heads("mqa", 8, 1)),
        ({"mla"}, {2, 32, 128}, Heads("mla", 2, 1), 128, Heads("mla", 128, 1)),
        ({"mla"}, {2, 32, 128}, Heads("mla", 2, 1), 127, Heads("mla", 32, 1)),
        ({"mla", "gqa"}, {2}, Heads("gqa", 4, 2), 8, Heads("gqa", 8, 4)),
        ({"mla"}, {16}, Heads("mla", 16, 1), 8, Heads("mla", 16, 1)),
    ],
)
def test_many_heads_are_claimed_ones_next_to_the_number(
    families: set[str], ratios: set[int], like: Heads, most: int, heads: Heads
) -> None:
    ropes = {64} if "mla" in families else CLAIMS.mla_rope_dims
    claims = CLAIMS.with_changes(families=families, gqa_ratios=ratios, mla_rope_dims=ropes)
    assert many_heads(claims, like, most) == heads
