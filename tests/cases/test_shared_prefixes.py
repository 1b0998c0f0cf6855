"""Many requests with a long prefix in common, plain and with the options of a layer but windows."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode

CAPABILITIES = TorchNativeBackend.capabilities


def shared(declared: Capabilities, mode: ForwardMode = ForwardMode.DECODE) -> list[Case]:
    return [case for case in generate(declared, mode, "core") if case.prefixes[:2] == (560, 601)]


@pytest.mark.parametrize("mode", ForwardMode)
def test_one_is_plain_and_one_has_all_options_but_a_window_and_several_kv_heads(mode: ForwardMode) -> None:
    minimal, optional = shared(CAPABILITIES, mode)
    assert not minimal.sinks
    assert not minimal.logit_cap
    assert minimal.kv_dtype == "same"
    assert optional.sinks
    assert optional.logit_cap
    assert optional.kv_dtype != "same"
    assert optional.heads.kv_heads > 1
    assert minimal.window == optional.window == -1, "a window turns a cascade off"
    assert minimal.prefixes == optional.prefixes
    assert minimal.bs >= 8


def test_where_no_option_is_declared_there_is_no_second_one() -> None:
    def without(*left_out: dict[str, object]) -> Capabilities:
        declared = CAPABILITIES
        for each in left_out:
            declared = declared.with_changes(**each)
        return declared

    options = ({"options": {"sinks": False}}, {"options": {"logit_cap": False}}, {"kv_pool": {"kv_dtypes": {"same"}}})
    assert len(shared(without(*options))) == 1
    for one in options:
        assert len(shared(without(*(each for each in options if each != one)))) == 2
