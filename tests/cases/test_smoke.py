"""Smoke tells settings apart, and has each declared feature once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import permutations

import pytest

from attn_testkit.cases.case import Case
from attn_testkit.catalogue.array import array_cases
from attn_testkit.catalogue.covering import few_rows
from attn_testkit.catalogue.never_together import features
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import KV_LAYOUTS, Capabilities, ForwardMode
from attn_testkit.registry import load_backend

BACKENDS = (
    "torch_native",
    "torch_native_formats",
    "torch_native_hybrid",
    "torch_native_ranks",
    "torch_native_sparse",
    "torch_native_state",
    "triton",
    "triton_sparse",
    "triton_state",
    "flashinfer",
    "flashinfer_mla",
    "trtllm_mha",
    "trtllm_mla",
    "trtllm_mla_sparse",
    "tokenspeed_mla",
)
DECODE = ForwardMode.DECODE
SETTINGS: dict[str, Callable[[Case], object]] = {
    "head dim": lambda case: case.head_dim,
    "dtype": lambda case: case.dtype,
    "page size": lambda case: case.page_size,
}


def declared_by(backend: str) -> Capabilities:
    return load_backend(backend).capabilities


def smoke(declared: Capabilities) -> list[Case]:
    return [case for mode in ForwardMode for case in generate(declared, mode, "smoke")]


def lacking(declared: Capabilities) -> set[str]:
    """Declared features that no case of smoke has."""
    cases, found = smoke(declared), set[str]()
    for mode in ForwardMode:
        plain = next((case for case in cases if case.mode is mode), None)
        tests = features(declared, mode, plain) if plain else {}
        found |= {name for name, test in tests.items() if not any(map(test, cases))}
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_declared_feature_has_a_case_of_smoke(backend: str) -> None:
    assert lacking(declared_by(backend)) == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_declared_format_and_layout_has_a_case_of_smoke(backend: str) -> None:
    declared = declared_by(backend)
    cases = smoke(declared)
    assert {case.kv_dtype for case in cases} >= declared.kv_pool.kv_dtypes
    if declared.state is None:
        assert {case.kv_layout for case in cases} >= declared.kv_pool.kv_layouts & frozenset(KV_LAYOUTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"alibi": ()}, "spans": {"modes": ()}, "cross_attention": {"modes": ()}},
        {"options": {"logit_cap": False, "sinks": False}, "windows": {"modes": ()}, "spans": {"modes": ()}},
        {"heads": {"families": {"mqa"}, "heads_by_layer": False}},
        {
            "heads": {"families": {"mla"}, "heads_by_layer": False, "wider_keys": ()},
            "options": {"alibi": (), "qq_bias": ()},
            "spans": {"modes": ()},
            "cross_attention": {"modes": ()},
        },
        {"eager": {"extend"}, "graph": {"decode"}},
        {
            "eager": {"decode"},
            "graph": (),
            "heads": {"head_dims": {128}},
            "kv_pool": {"page_sizes": {64}},
            "precision": {"dtypes": {"bf16"}},
        },
    ],
)
def test_narrower_capabilities_have_each_of_their_features_too(changes: dict[str, object]) -> None:
    assert lacking(declared_by("torch_native").with_changes(**changes)) == set()


def test_a_feature_that_is_left_out_of_the_array_has_a_case_in_its_first_mode_only() -> None:
    cases = smoke(declared_by("torch_native"))
    found = [case for case in cases if "narrower_widths" in case.variants]
    assert [case.mode for case in found] == [ForwardMode.TARGET_VERIFY]


def values_of_one(cases: Iterable[Case], one: str, other: str) -> dict[object, list[object]]:
    """Each value of one setting -> the values of another that its cases have."""
    found: dict[object, list[object]] = {}
    for case in cases:
        found.setdefault(SETTINGS[one](case), []).append(SETTINGS[other](case))
    return found


@pytest.mark.parametrize(("one", "other"), list(permutations(SETTINGS, 2)))
@pytest.mark.parametrize("backend", ["torch_native", "torch_native_sparse", "triton", "trtllm_mha", "flashinfer"])
def test_no_head_dim_dtype_or_page_size_always_comes_with_the_same_value_of_another(
    backend: str, one: str, other: str
) -> None:
    declared = declared_by(backend)
    cases = list(array_cases(declared, DECODE, "smoke", 0))
    if len({SETTINGS[other](case) for case in cases}) > 1:
        by_value = values_of_one(cases, one, other)
        assert not [value for value, others in by_value.items() if len(others) > 1 and len(set(others)) == 1]


def test_a_selection_leaves_keys_out_for_each_declared_number_of_keys() -> None:
    for topk in (1, 64, 512, 2048):
        declared = declared_by("torch_native_sparse").with_changes(sparse={"topk": {topk}})
        for mode in ForwardMode:
            cases = generate(declared, mode, "smoke")
            assert any(case.selection and max(case.prefixes) > case.selection.keys for case in cases), (topk, mode)


def pairs(rows: Sequence[Sequence[int]]) -> set[tuple[int, int, int, int]]:
    columns = range(len(rows[0]))
    return {(a, row[a], b, row[b]) for row in rows for a in columns for b in columns if a < b}


def test_few_rows_have_each_value_and_few_pairs_twice() -> None:
    rows = few_rows((3, 3, 2, 8), 8)
    assert [{row[at] for row in rows} for at in range(4)] == [set(range(size)) for size in (3, 3, 2, 8)]
    assert len({pair for pair in pairs(rows) if pair[0] == 0 and pair[2] == 1}) >= 8
    in_turn = [[(row + at) % size for at, size in enumerate((3, 3, 2, 8))] for row in range(8)]
    assert len(pairs(rows)) > len(pairs(in_turn))


def test_few_rows_have_no_excluded_pair_and_a_later_value_once() -> None:
    excluded = {((0, value), (2, 1)) for value in (0, 2)}
    rows = few_rows((3, 4, 2, 3), 6, excluded, later=(2, 3))
    assert [row[2] for row in rows].count(1) == 1
    assert sorted(row[3] for row in rows) == [0, 0, 0, 0, 1, 2]
    assert [row[0] for row in rows if row[2] == 1] == [1]
    assert rows[0][2:] == [0, 0], "the first row is plain in columns of later values"
