"""The plainest case: one request, and the least of everything that is declared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.catalogue.minimal import minimal_case, minimal_cases
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.examples import MinimalBackend

CAPABILITIES = TorchNativeBackend.capabilities
MLA = CAPABILITIES.with_changes(
    heads={"families": {"mla"}, "gqa_ratios": {16, 128}, "head_dims": {512}},
    kv_pool={"page_sizes": {32, 64}},
    windows={"smallest": 1},
)


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize(
    "declared", [CAPABILITIES, MLA, MinimalBackend.capabilities.with_changes(options={"any_scaling": False})]
)
def test_it_is_declared_and_has_an_id_in_every_mode(declared: Capabilities, mode: ForwardMode) -> None:
    declared = declared.with_changes(eager={mode}, bounds={"max_topk": 1})
    case = minimal_case(declared, mode)
    assert parse_case(case.id) == case
    assert not_declared(declared, case) == ""


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (ForwardMode.DECODE, "decode-mla16-d512r64-bf16-p32-k0-contiguous-gauss-b1prod"),
        (ForwardMode.DRAFT_EXTEND, "draft-extend-mla16-d512r64-bf16-p32-k0-n1a1-contiguous-gauss-b1prod"),
        (ForwardMode.TARGET_VERIFY, "target-verify-mla16-d512r64-bf16-p32-k0-chain1-contiguous-gauss-b1prod"),
        (ForwardMode.EXTEND, "extend-mla16-d512r64-bf16-p32-k0-n1a1-contiguous-gauss-b1prod"),
        (ForwardMode.DRAFT_DECODE, "draft-decode-mla16-d512r64-bf16-p32-k0-topk1steps2-contiguous-gauss-b1prod"),
    ],
)
def test_its_values_are_the_least_that_are_declared(mode: ForwardMode, name: str) -> None:
    assert (
        minimal_case(MLA.with_changes(heads={"mla_rope_dims": {64}}, precision={"dtypes": {"fp16", "bf16"}}), mode).id
        == name
    )


def test_what_stands_in_for_it_has_some_keys() -> None:
    cases = list(minimal_cases(CAPABILITIES, ForwardMode.DECODE))
    assert [case.prefixes for case in cases] == [(0,), (5,), (21,)]
    assert {replace(case, prefixes=(0,)) for case in cases} == {minimal_case(CAPABILITIES, ForwardMode.DECODE)}


def test_capabilities_that_leave_no_heads_are_said() -> None:
    with pytest.raises(ValueError, match="decode is declared, but no head layout that goes with it is"):
        minimal_case(CAPABILITIES.with_changes(heads={"families": {"gqa"}, "gqa_ratios": {1}}), ForwardMode.DECODE)
