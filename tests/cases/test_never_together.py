"""Every pair of features that a backend declares meets in a case of core, or something says why they do not."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.backends.torch_native_hybrid import TorchNativeHybridBackend
from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.catalogue.never_together import describe_never_together, meeting_cases, never_together
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import AttentionBackend, Capabilities, ForwardMode, HeadShapes, Precision

BACKENDS: list[type[AttentionBackend]] = [
    TorchNativeBackend,
    TorchNativeFormatsBackend,
    TorchNativeHybridBackend,
    TorchNativeSparseBackend,
    TorchNativeStateBackend,
]
PLAIN = Capabilities(
    eager={"decode", "extend"},
    heads=HeadShapes(families={"gqa"}, gqa_ratios={2}, head_dims={64}),
    precision=Precision(dtypes={"bf16"}),
)


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)
def test_features_meet_in_core_or_exclude_each_other_for_a_reason(
    backend: type[AttentionBackend], mode: ForwardMode
) -> None:
    found = never_together(backend.capabilities, mode, generate(backend.capabilities, mode, "core"))
    assert [gap for gap in found if not gap.why or len(gap.features) == 1] == []


def test_a_feature_that_the_family_excludes_is_said_to_have_no_case() -> None:
    declared = TorchNativeStateBackend.capabilities.with_changes(server={"narrower_widths": {"target-verify"}})
    mode = ForwardMode.TARGET_VERIFY
    cases = generate(declared, mode, "core")
    single, several = describe_never_together(declared, [mode, ForwardMode.DECODE], cases)
    assert single == ("narrower_widths (target-verify): pools of states are made for one width",)
    assert several == ()


def test_features_that_exclude_each_other_are_named_with_the_reason() -> None:
    declared = PLAIN.with_changes(windows={"modes": {"extend"}}, options={"non_causal": {"extend"}})
    single, several = describe_never_together(
        declared, [ForwardMode.EXTEND], generate(declared, ForwardMode.EXTEND, "core")
    )
    assert single == ()
    why = "a window of layers that are not causal needs a declared meaning"
    assert f"sliding window with layers that are not causal: {why}" in several


def test_a_pair_that_nothing_excludes_and_no_case_has_is_a_gap() -> None:
    declared, mode = TorchNativeBackend.capabilities, ForwardMode.DECODE
    cases = generate(declared, mode, "core")
    without = [case for case in cases if not (case.sinks and "given_out" in case.variants)]
    assert ("sinks", "given_out") in {gap.features for gap in never_together(declared, mode, without) if not gap.why}
    made = list(meeting_cases(declared, mode, without))
    assert any(case.sinks and "given_out" in case.variants for case in made)
