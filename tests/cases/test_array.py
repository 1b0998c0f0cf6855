"""The array of core: every allowed pair of columns meets, and a row is a case as it stands."""

from __future__ import annotations

from itertools import combinations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case
from attn_testkit.cases.declared import not_declared
from attn_testkit.catalogue.array import array_cases, array_of
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.registry import load_backend

CAPABILITIES = TorchNativeBackend.capabilities
DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY
BACKENDS = ("torch_native", "triton", "torch_native_formats", "torch_native_sparse", "flashinfer_mla", "trtllm_mha")


def lacking(declared: Capabilities, mode: ForwardMode) -> list[tuple[str, str]]:
    """Allowed pairs of values that no row of core has."""
    array = array_of(declared, mode, "core")
    rows, found = array.rows(), []
    columns = list(array.columns.items())
    for (at, (one, values)), (later, (other, others)) in combinations(enumerate(columns), 2):
        if (at, later) in array.unpaired:
            continue
        met = {(repr(row[one]), repr(row[other])) for row in rows}
        found += [
            (f"{one} {value}", f"{other} {second}")
            for i, value in enumerate(values)
            for j, second in enumerate(others)
            if ((at, i), (later, j)) not in array.excluded and (repr(value), repr(second)) not in met
        ]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_allowed_pair_of_columns_meets_in_core(backend: str) -> None:
    declared = load_backend(backend).capabilities
    assert {mode: found for mode in ForwardMode if (found := lacking(declared, mode))} == {}


@pytest.mark.parametrize("mode", ForwardMode)
def test_a_row_is_a_case_as_it_stands(mode: ForwardMode) -> None:
    names = ("heads", "head_dim", "dtype", "page_size", "kv_dtype", "kv_layout", "alibi", "spans", "qq_bias", "tree")
    array = array_of(CAPABILITIES, mode, "core")
    for row in array.rows():
        case = array.build(row)
        assert case is not None
        listed = {name: row[name] for name in names if name in row}
        if case.heads.layout.values_in_keys and listed["head_dim"] == 256:
            listed["head_dim"] = 512  # the widest head dim of the column stands for the widest latent rows
        assert {name: getattr(case, name) for name in listed} == listed
        # The window of a layer that is not causal brings such layers.
        brought = {"noncausal"} if case.non_causal_window != "none" else set()
        assert (
            set(case.variants) - brought
            == {word for word in row if row[word] is True and word in case.variants} - brought
        )
        assert not_declared(CAPABILITIES, case) == ""


def core(mode: ForwardMode, declared: Capabilities = CAPABILITIES) -> list[Case]:
    return list(array_cases(declared, mode, "core", 0))


def test_options_that_exclude_much_meet_heads_pages_formats_layouts_and_server_variants() -> None:
    options = {
        "ALiBi": lambda case: case.alibi,
        "spans": lambda case: case.spans is not None,
        "additive bias": lambda case: case.qq_bias != "none",
        "local chunks": lambda case: case.local_chunk > 0,
        "requests without rows": lambda case: 0 in case.new,
        "keys in parts": lambda case: bool(case.kv_splits),
        "two KV groups": lambda case: case.layers.groups,
    }
    for name, has in options.items():
        found = [case for case in core(EXTEND) if has(case)]
        assert {case.kv_layout for case in found} == CAPABILITIES.kv_pool.kv_layouts, name
        assert {case.kv_dtype for case in found} == CAPABILITIES.kv_pool.kv_dtypes, name
        assert len({case.page_size for case in found}) == 5, name
        assert {"overlap_scheduling"} <= {word for case in found for word in case.variants}, name
        assert max(max(case.prefixes) for case in found) >= 600, name


def test_layers_that_differ_leave_off_what_a_value_excludes_and_keep_the_rest() -> None:
    found = [case for case in core(DECODE) if case.alibi and case.layers.varied]
    assert found
    assert all(case.logit_cap == 0 and not case.sinks for case in found)
    assert all(case.window >= 0 or case.local_chunk for case in found)


def test_the_first_rows_are_plain() -> None:
    def extras(case: Case) -> bool:
        return bool(case.variants or case.kv_splits or case.alibi or case.layers.groups or case.kv_layout != "nhd")

    for mode in ForwardMode:
        assert not [case for case in core(mode)[:14] if extras(case)]
        assert [case for case in core(mode) if extras(case)]
        first, *others = array_cases(CAPABILITIES, mode, "smoke", 0)
        assert not extras(first)
        assert any(map(extras, others))


def test_what_is_not_declared_is_in_no_row() -> None:
    narrow = CAPABILITIES.with_changes(
        lse=None,
        kv_pool={"kv_groups": False, "kv_layouts": {"nhd"}},
        options={"non_causal": (), "alibi": ()},
        server={"takes_out": False, "takes_more_rows": False, "takes_bare_chains": False},
    )
    for mode in ForwardMode:
        words = {word for case in core(mode, narrow) for word in case.variants}
        assert words <= {"empty_batches", "zero_length_padding", "seq_lens_with_new", "overlap_scheduling",
                         "unusedscales"}  # fmt: skip
        assert not [case for case in core(mode, narrow) if case.kv_splits or case.alibi or case.layers.groups]


def test_trees_that_branch_have_no_window_if_that_is_not_declared() -> None:
    chains = core(VERIFY, CAPABILITIES.with_changes(windows={"in_trees": False}))
    assert {case.topk > 1 for case in chains if case.window < 0} == {False, True}
    assert {case.topk > 1 for case in chains if case.window >= 0} == {False}
