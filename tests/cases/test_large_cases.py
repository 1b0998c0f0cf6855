"""Cases of more requests times heads, and of more rows, than a side of a CUDA grid holds; and of long contexts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from attn_testkit.backends.flashinfer_mla import FlashInferMLABackend
from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.backends.torch_native_sparse import TorchNativeSparseHeadsBackend, TorchNativeSparsePackedBackend
from attn_testkit.cases.case import Case, Heads
from attn_testkit.cases.co_residents import many_heads
from attn_testkit.cases.nearest_declared import nearest_declared
from attn_testkit.catalogue.large_cases import large_cases, too_large_for_a_cpu
from attn_testkit.catalogue.named import named_from, smallest_of, without_options_of
from attn_testkit.catalogue.tiers import generate, within_declared
from attn_testkit.contract import AttentionBackend, Capabilities, ForwardMode

GRID = 65_535
"""What CUDA's programming guide gives as the largest y and z of a grid."""
CAPABILITIES = TorchNativeBackend.capabilities
MLA = FlashInferMLABackend.capabilities


def small_of(declared: Capabilities, mode: ForwardMode) -> Case:
    base = named_from(list(generate(declared, mode, "core")))
    return smallest_of(declared, without_options_of(declared, base))


def of_full(declared: Capabilities, mode: ForwardMode, tier: str = "full") -> list[Case]:
    """The large cases of a mode. Those of one mode are held against what ``full`` has, whose array takes seconds."""
    found = [
        nearest_declared(declared, case.with_seed(0)) for case in large_cases(declared, tier, small_of(declared, mode))
    ]
    assert all(within_declared(declared, case) for case in found)
    return found


def beyond_a_grid(mode: ForwardMode, tier: str) -> list[Case]:
    return [case for case in of_full(CAPABILITIES, mode, tier) if case.bs * case.heads.q_heads > GRID]


@pytest.mark.parametrize("mode", [mode for mode in ForwardMode if mode is not ForwardMode.DRAFT_EXTEND])
def test_requests_times_heads_are_just_more_than_a_grid_holds(mode: ForwardMode) -> None:
    assert len(beyond_a_grid(mode, "core")) == (mode is ForwardMode.DECODE)
    (case,) = beyond_a_grid(mode, "full")
    assert (case.bs - 1) * case.heads.q_heads <= GRID
    assert len(set(case.prefixes)) > 1
    assert not too_large_for_a_cpu(case)


@pytest.mark.parametrize(("families", "heads"), [({"mha", "gqa"}, (128, 128)), ({"gqa"}, (128, 16))])
def test_a_batch_beyond_a_grid_has_as_many_lists_if_kv_heads_select(families: set[str], heads: tuple[int, int]) -> None:
    """The lengths of 32,768 lists filled a buffer (flashinfer #2802)."""
    declared = TorchNativeSparseHeadsBackend.capabilities.with_changes(heads={"families": families})
    (case,) = of_full(declared, ForwardMode.DECODE, "core")
    assert (case.heads.q_heads, case.heads.kv_heads) == heads
    assert case.bs * case.heads.q_heads == GRID + 1


@pytest.mark.parametrize("declared", [CAPABILITIES, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("mode", ForwardMode)
def test_a_context_of_131072_tokens_has_many_heads(mode: ForwardMode, declared: Capabilities) -> None:
    (case,) = [case for case in of_full(declared, mode) if max(case.prefixes) > 100_000]
    assert 130_000 < max(case.prefixes) < 131_072
    assert case.heads.q_heads == 32
    assert case.data == "one_hot", "with ordinary values nobody sees one key of so many"


def test_full_has_one_of_each_kind_and_core_has_none_of_an_extend() -> None:
    def kinds(cases: Iterable[Case]) -> list[tuple[bool, bool, bool]]:
        found = ((max(c.prefixes) > 100_000, c.bs * c.heads.q_heads > GRID, too_large_for_a_cpu(c)) for c in cases)
        return sorted(kind for kind in found if any(kind))

    assert kinds(generate(CAPABILITIES, ForwardMode.EXTEND, "full")) == kinds(of_full(CAPABILITIES, ForwardMode.EXTEND))
    assert len(kinds(of_full(CAPABILITIES, ForwardMode.EXTEND))) == 3
    assert not kinds(generate(CAPABILITIES, ForwardMode.EXTEND, "core"))
    assert kinds(generate(CAPABILITIES, ForwardMode.DECODE, "core")) == [(False, True, False)]


def of_counts(case: Case, new: tuple[int, ...]) -> Case:
    return replace(case, rows=case.rows.counted(new))


def test_an_extend_of_more_rows_than_a_grid_holds_is_too_large_for_a_cpu() -> None:
    (case,) = [case for case in of_full(CAPABILITIES, ForwardMode.EXTEND) if too_large_for_a_cpu(case)]
    rows = sum(case.new)
    assert GRID < rows <= GRID + case.new[0]
    fewer = of_counts(case, (*case.new[1:], 1))
    assert sum(fewer.new) == rows - case.new[0] + 1
    assert too_large_for_a_cpu(of_counts(case, (*case.new[:-1], case.new[0] - (rows - GRID - 1))))
    assert not too_large_for_a_cpu(of_counts(case, (*case.new[:-1], case.new[0] - (rows - GRID))))


def test_few_new_tokens_make_more_requests() -> None:
    few = CAPABILITIES.with_changes(bounds={"max_extend_tokens": 8})
    found = large_cases(few, "full", small_of(CAPABILITIES, ForwardMode.EXTEND))
    (case,) = [case for case in found if too_large_for_a_cpu(case)]
    assert set(case.new) == {8}


def test_rows_of_mla_are_not_compared_by_the_ten_thousand() -> None:
    assert [max(case.prefixes) > 100_000 for case in of_full(MLA, ForwardMode.EXTEND)] == [True]
    assert not of_full(MLA, ForwardMode.EXTEND, "core")


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
def test_many_heads_are_declared_ones_next_to_the_number(
    families: set[str], ratios: set[int], like: Heads, most: int, heads: Heads
) -> None:
    ropes = {64} if "mla" in families else CAPABILITIES.heads.mla_rope_dims
    declared = CAPABILITIES.with_changes(heads={"families": families, "gqa_ratios": ratios, "mla_rope_dims": ropes})
    assert many_heads(declared, like, most) == heads


@pytest.mark.parametrize(
    ("backend", "far", "mode"),
    [
        (TorchNativeBackend, 65_536, ForwardMode.DECODE),
        (TorchNativeBackend, 65_536, ForwardMode.EXTEND),
        (TorchNativeFormatsBackend, 16_384, ForwardMode.DECODE),
        (TorchNativeFormatsBackend, 16_384, ForwardMode.EXTEND),
        (TorchNativeSparsePackedBackend, 8_192, ForwardMode.DECODE),
    ],
)
def test_core_has_a_long_request_in_each_dtype_of_the_pool(
    backend: type[AttentionBackend], far: int, mode: ForwardMode
) -> None:
    declared = backend.capabilities
    longest = dict.fromkeys(declared.kv_pool.kv_dtypes, 0)
    for case in generate(declared, mode, "core"):
        longest[case.kv_dtype] = max(longest[case.kv_dtype], *case.prefixes)
    assert min(longest.values()) > far
