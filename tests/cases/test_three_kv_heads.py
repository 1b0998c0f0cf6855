"""A case of several KV heads whose number is no power of two."""

from __future__ import annotations

from typing import Any

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Heads
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode

CAPABILITIES: Capabilities = TorchNativeBackend.capabilities


def of_three(mode: ForwardMode, tier: str = "core", **changed: Any) -> list[Heads]:
    cases = generate(CAPABILITIES.with_changes(**changed), mode, tier)
    return [case.heads for case in cases if case.heads.kv_heads == 3]


@pytest.mark.parametrize("mode", ForwardMode)
def test_core_has_one_in_each_mode_of_the_smallest_group_and_smoke_has_none(mode: ForwardMode) -> None:
    assert of_three(mode) == [Heads("gqa", 6, 3)]
    assert of_three(mode, heads={"gqa_ratios": {1, 4, 8}}) == [Heads("gqa", 12, 3)]
    assert of_three(mode, "smoke") == []


def test_a_backend_without_groups_has_as_many_query_heads_and_one_of_one_kv_head_none() -> None:
    assert of_three(ForwardMode.DECODE, heads={"families": {"mha"}}) == [Heads("mha", 3, 3)]
    assert of_three(ForwardMode.DECODE, heads={"gqa_ratios": {1}, "families": {"mha", "gqa"}}) == [Heads("mha", 3, 3)]
    assert of_three(ForwardMode.DECODE, heads={"families": {"mqa"}}) == []
    assert of_three(ForwardMode.DECODE, heads={"families": {"mla"}}) == []
