"""Options of a layer beside what is usually tried without them, and contexts that are full."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from as_made import as_made

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import CODES, Case
from attn_testkit.cases.plans import context_len
from attn_testkit.contract import Capabilities, ForwardMode

DECODE, VERIFY, V1, V2, EXTEND, DRAFT = ForwardMode
CAPABILITIES = TorchNativeBackend.capabilities
KINDS: dict[str, tuple[Callable[[Case], bool], set[ForwardMode]]] = {
    "window in another layout": (lambda case: case.kv_layout != "nhd" and case.window >= 0, set(ForwardMode)),
    "window and sinks into lent memory": (
        lambda case: "given_out" in case.variants and case.window >= 0,
        set(ForwardMode),
    ),
    "FP8 into lent memory": (lambda case: "given_out" in case.variants and case.kv_dtype != "same", set(ForwardMode)),
    "FP8 in a large pool": (lambda case: "bigpool" in case.variants and case.kv_dtype != "same", {DECODE, EXTEND}),
    "window and rows behind the plan's": (
        lambda case: "padded_tokens" in case.variants and case.window >= 0,
        set(ForwardMode) - {DRAFT},
    ),
    "window planned ahead": (lambda case: "overlap_scheduling" in case.variants and case.window >= 0, set(ForwardMode)),
    "sinks where nothing is causal": (lambda case: "noncausal" in case.variants and case.sinks, {VERIFY, EXTEND}),
    "window in a chain without links": (lambda case: "no_tree_tensors" in case.variants and case.window >= 0, {VERIFY}),
    "window where lengths count new tokens": (
        lambda case: "seq_lens_with_new" in case.variants and case.window >= 0,
        {VERIFY},
    ),
}


def core(mode: ForwardMode, declared: Capabilities = CAPABILITIES) -> tuple[Case, ...]:
    return as_made(declared, mode, "core")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_tried_alone_is_tried_with_options_of_the_layer_too(kind: str) -> None:
    has, modes = KINDS[kind]
    assert {mode for mode in ForwardMode if any(map(has, core(mode)))} == modes


def of_variant(word: str) -> Callable[[Case], bool]:
    return lambda case: word in case.variants


@pytest.mark.parametrize("in_trees", [True, False])
def test_trees_meet_groups_parts_and_ways_beside_a_window_or_else_without(in_trees: bool) -> None:
    """FlashInfer's verify takes windows of chains and trees without one; SGLang's Triton backend both at once."""
    kinds: list[Callable[[Case], bool]] = [
        lambda case: case.layers.groups,
        lambda case: bool(case.layers.shapes),
        lambda case: bool(case.kv_splits),
        *map(of_variant, ("given_out", "padded_tokens", "overlap_scheduling", "seq_lens_with_new")),
    ]
    cases = core(VERIFY, CAPABILITIES.with_changes(windows={"in_trees": in_trees}))
    for has in kinds:
        met = {case.window >= 0 for case in cases if has(case) and case.topk > 1}
        assert in_trees in met
        assert in_trees or met == {False}


def test_windows_hide_keys_there() -> None:
    together = [
        case
        for mode in ForwardMode
        for case in core(mode)
        if case.window == 7 and (case.variants or case.mode != DECODE)
    ]
    assert together
    # A chunk of a prompt that is longer than the window hides keys of its own.
    chunks = [case.most_new - 1 if case.mode == EXTEND else 0 for case in together]
    assert all(max(*case.prefixes, new) > case.window for case, new in zip(together, chunks, strict=True))


def test_every_other_layout_meets_a_window_in_heads_that_differ() -> None:
    for mode in (VERIFY, V1, V2, EXTEND):
        met = [case for case in core(mode) if case.kv_layout != "nhd" and case.window >= 0]
        assert {case.kv_layout for case in met} == CAPABILITIES.kv_layouts - {"nhd"}
        assert all(case.heads.kv_heads > 1 for case in met)


def test_what_is_not_declared_is_in_none_of_them() -> None:
    declared = CAPABILITIES.with_changes(windows=(), sinks=False, logit_cap=False, kv_dtypes={"same"})
    for mode in ForwardMode:
        for case in core(mode, declared):
            assert case.window < 0
            assert not case.sinks
            assert case.kv_dtype == "same"
    assert not any(
        "given_out" in case.variants for case in core(DECODE, CAPABILITIES.with_changes(server={"takes_out": False}))
    )


def full(declared: Capabilities, mode: ForwardMode) -> list[Case]:
    """Cases of codes whose second request takes five eighths of the context."""
    of_codes = [case for case in core(mode, declared) if case.data == CODES]
    near = range(declared.max_context_len * 5 // 8, declared.max_context_len * 5 // 8 + 40)
    return [case for case in of_codes if len(case.prefixes) == 2 and case.prefixes[1] in near]


@pytest.mark.parametrize("mode", ForwardMode, ids=str)
@pytest.mark.parametrize("most", [301, 4096, 5000, 66_000])
def test_a_request_fills_the_context_and_another_five_eighths_of_it(mode: ForwardMode, most: int) -> None:
    (found,) = full(CAPABILITIES.with_changes(max_context_len=most, families={"mqa"}, dtypes={"bf16"}), mode)
    assert most - (found.page_size if mode is DRAFT else 0) <= context_len(found) <= most
    assert found.prefixes[0] > most - 100


def test_longer_contexts_have_other_long_cases_and_short_ones_need_none() -> None:
    for most in (300, 66_001):
        assert not full(CAPABILITIES.with_changes(max_context_len=most, families={"mqa"}, dtypes={"bf16"}), DECODE)


def test_of_mla_8192_tokens_are_filled_and_no_more() -> None:
    mla = CAPABILITIES.with_changes(families={"mla"}, head_dims={512}, dtypes={"bf16"})
    assert full(mla.with_changes(max_context_len=8192), DECODE)
    assert not full(mla.with_changes(max_context_len=8193), DECODE)
