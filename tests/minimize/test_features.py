"""Features of cases: which differ, what makes one plain, and what is nearer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.features.numbers import nearer_numbers
from attn_testkit.catalogue.minimal import minimal_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.minimize.search import FEATURES, changed, needs, odd_features

CAPABILITIES = TorchNativeBackend.capabilities


def every_case(tier: str = "core") -> Iterator[Case]:
    for mode in ForwardMode:
        yield from generate(CAPABILITIES, mode, tier)


def test_two_cases_differ_in_some_feature() -> None:
    for case in every_case():
        minimal = minimal_case(CAPABILITIES, case.mode)
        assert odd_features(case, minimal) or case == minimal


def test_every_feature_is_that_of_some_case() -> None:
    seen = {name for case in every_case() for name in odd_features(case, minimal_case(CAPABILITIES, case.mode))}
    seen |= set(odd_features(by_id("decode-mla2-d64r64-bf16-p1-k0-contiguous-gauss-b1prod-s3"), DECODE))
    seen |= set(odd_features(by_id("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-usualscale-b1prod"), DECODE))
    prefixed = by_id("draft-decode-mha2-d64-bf16-p1-k1-topk1steps2-prefixed-contiguous-gauss-b1prod")
    seen |= set(odd_features(prefixed, minimal_case(CAPABILITIES, prefixed.mode)))
    seen |= set(odd_features(by_id("decode-mha2-d64-bf16-p1-k9-contiguous-gauss-sel4-idx4-b1prod"), DECODE))
    seen |= set(odd_features(by_id("decode-gdn2x1-d64-bf16-p1-k9-contiguous-mild_decay-k32w2s32-b1prod"), DECODE))
    seen |= set(odd_features(by_id("extend-mha2-d64-bf16-p1-k0-n1a1-contiguous-gauss-pcp2zigzag-b1prod"), EXTEND))
    seen |= set(odd_features(by_id("decode-mha2-d64-bf16-p1-k9-contiguous-gauss-handed1to1p1nhd-b1prod"), DECODE))
    seen |= set(odd_features(by_id("decode-mha2-d64-bf16-p1-k9-contiguous-gauss-offloadlayerfirst-b1prod"), DECODE))
    compressed = "decode-compressor1-d64-bf16-p16-k9-contiguous-gauss-ratio4-b1prod"
    seen |= set(odd_features(by_id(compressed), DECODE))
    encoder = "extend-mha2-d64-bf16-p1-k0-n1a1-contiguous-gauss-b1prod-noncausal-encoder"
    seen |= set(odd_features(by_id(encoder), EXTEND))
    assert list(FEATURES) == [name for name in FEATURES if name in seen]


def by_id(name: str) -> Case:
    return parse_case(name)


DECODE = by_id("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-b1prod")
V1 = by_id("draft-extend-mha2-d64-bf16-p1-k0-n1a1-contiguous-gauss-b1prod")
EXTEND = by_id("extend-mha2-d64-bf16-p1-k0-n1a1-contiguous-gauss-b1prod")
VERIFY = by_id("target-verify-mha2-d64-bf16-p1-k0-chain1-contiguous-gauss-b1prod")
DRAFT = by_id("draft-decode-mha2-d64-bf16-p1-k0-topk1steps2-contiguous-gauss-b1prod")
IDS = {
    "requests": ("decode-mha2-d64-bf16-p1-k0x3-contiguous-gauss-b3prod", "3", DECODE, "1"),
    "heads": ("decode-gqa4x2-d64-bf16-p1-k0-contiguous-gauss-b1prod", "gqa4x2", DECODE, "mha2"),
    "head dim": ("decode-mha2-d128-bf16-p1-k0-contiguous-gauss-b1prod", "128", DECODE, "64"),
    "dtype": ("decode-mha2-d64-fp32-p1-k0-contiguous-gauss-b1prod", "fp32", DECODE, "bf16"),
    "page size": ("decode-mha2-d64-bf16-p16-k0-contiguous-gauss-b1prod", "16", DECODE, "1"),
    "keys": ("decode-mha2-d64-bf16-p1-k33-contiguous-gauss-b1prod", "33", DECODE, "0"),
    "layout": ("decode-mha2-d64-bf16-p1-k0-shared-gauss-b1prod", "shared", DECODE, "contiguous"),
    "data": ("decode-mha2-d64-bf16-p1-k0-contiguous-rising_logits-b1prod", "rising_logits", DECODE, "gauss"),
    "KV dtype": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-kvfp8e4m3-b1prod", "fp8_e4m3", DECODE, "same"),
    "KV layout": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-kvhnd-b1prod", "hnd", DECODE, "nhd"),
    "window": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-w0one-b1prod", "0one", DECODE, "none"),
    "soft cap": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-cap1.5-b1prod", "1.5", DECODE, "0.0"),
    "sinks": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-sink-b1prod", "yes", DECODE, "no"),
    "layers": (
        "decode-mha2-d64-bf16-p1-k0-contiguous-gauss-layers3from5-b1prod", "layers3from5", DECODE, "layers2from0",
    ),
    "KV splits": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-lsepages2-b1prod", "pages2", DECODE, "none"),
    "padded requests": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-b4prod", "3", DECODE, "0"),
    "padding": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-b1nan", "nan", DECODE, "prod"),
    "multi_mode": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-b1prod-multi_mode", "yes", DECODE, "no"),
    "variants": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-b1prod-far", "far", DECODE, "none"),
    "seed": ("decode-mha2-d64-bf16-p1-k0-contiguous-gauss-b1prod-s7", "7", DECODE, "0"),
    "rows": ("draft-extend-mha2-d64-bf16-p1-k0-n6a3-contiguous-gauss-b1prod", "3 of 6", V1, "1 of 1"),
    "chunks": ("extend-mha2-d64-bf16-p1-k0-n1a1-chunks3-contiguous-gauss-b1prod", "3", EXTEND, "1"),
    "loop": ("draft-decode-mha2-d64-bf16-p1-k0-topk1steps2-loop6-contiguous-gauss-b1prod", "6", DRAFT, "0"),
}  # fmt: skip


@pytest.mark.parametrize("name", IDS)
def test_a_word_of_the_id_is_a_feature_that_is_made_plain_by_itself(name: str) -> None:
    odd, value, minimal, of_plain = IDS[name]
    assert list(map(str, needs(by_id(odd), minimal))) == [f"{name} {value} (minimal: {of_plain})"]
    assert changed(by_id(odd), FEATURES[name].reset(by_id(odd), minimal)) == minimal


@pytest.mark.parametrize(
    ("name", "words", "minimal"),
    [
        ("target-verify-mha2-d64-bf16-p1-k0-chain4-contiguous-gauss-b1prod", "rows chain of 4", VERIFY),
        ("target-verify-mha2-d64-bf16-p1-k0-t0.0.1-contiguous-gauss-b1prod", "rows tree 0.0.1", VERIFY),
        ("draft-decode-mha2-d64-bf16-p1-k0-topk2steps4-contiguous-gauss-b1prod", "rows top-k 2 of 4 steps", DRAFT),
        ("extend-mha2-d64-bf16-p1-k0-n17a17-contiguous-gauss-b1prod", "rows 17", EXTEND),
    ],
)
def test_rows_are_what_the_mode_makes_of_them(name: str, words: str, minimal: Case) -> None:
    (need,) = needs(by_id(name), minimal)
    assert str(need).startswith(words)
    assert changed(by_id(name), FEATURES["rows"].reset(by_id(name), minimal)) == minimal


def test_requests_and_what_they_have_are_reported_apart() -> None:
    case = by_id("draft-extend-mha2-d64-bf16-p1-k7x2-n6a1.3-contiguous-gauss-b4prod")
    assert odd_features(case, V1) == ["requests", "keys", "rows", "padded requests"]
    alone = changed(case, FEATURES["requests"].reset(case, V1))
    assert alone.id == "draft-extend-mha2-d64-bf16-p1-k7-n6a1-contiguous-gauss-b3prod"


def test_every_case_is_made_plain_feature_by_feature() -> None:
    for case in every_case():
        minimal = minimal_case(CAPABILITIES, case.mode)
        needing = ("window of non-causal layers", "shared KV", "variants")
        for name in (*needing, "layers", "KV splits", "multi_mode", "loop", "requests", *FEATURES):
            case = changed(case, FEATURES[name].reset(case, minimal))
        assert case == minimal


def test_what_is_nearer_differs_in_no_feature_in_which_the_case_does_not() -> None:
    for case in every_case("smoke"):
        minimal = minimal_case(CAPABILITIES, case.mode)
        for name, feature in FEATURES.items():
            for changes in feature.steps(CAPABILITIES, case, minimal) if name in odd_features(case, minimal) else ():
                try:
                    near = changed(case, changes)
                except ValueError:
                    continue
                assert set(odd_features(near, minimal)) <= set(odd_features(case, minimal)), (case.id, near.id)
                assert parse_case(near.id) == near


def test_numbers_come_from_half_way_on() -> None:
    assert list(nearer_numbers(33, 0)) == [17, 25, 29, 31, 32]
    assert list(nearer_numbers(3, 21)) == [12, 7, 5, 4]
    assert list(nearer_numbers(1, 0)) == []
