"""Quotients exactly between two numbers of a format, of which a store must take the even one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_process import check_backend

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.data_pattern import HALFWAY
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ROPE_IN_VALUE, ROW_FORMATS, ForwardMode, KVPools
from attn_testkit.contract.row_format import FP4_TIES, TIES, PackedRows, in_tiles
from attn_testkit.families.by_layer import layers as layers_of
from attn_testkit.steps.packed_rows import with_halfway_numbers
from attn_testkit_corpus.faults.catalogue import entry_of

WITH_RULE = sorted(name for name, each in ROW_FORMATS.items() if each.rounds_halfway)
STORED = "decode-gqa8x2-d64-bf16-p1-k2x2-shuffled-halfway-kvfp8pertokenhead-b2prod"
BY_HEAD = "extend-gqa8x2-d64-bf16-p1-k2x2-n2a2x2-shuffled-halfway-kvfp8perhead-b2prod"
E4M3 = torch.float8_e4m3fn
FP4_BOTH = STORED.replace("kvfp8pertokenhead", "kv{}")


def rows_of(name: str) -> tuple[PackedRows, torch.Tensor]:
    """Rows of a format, and halfway keys [32, width] in bf16."""
    rope = "" if name in ROPE_IN_VALUE else "r64"
    heads = f"mla4-d256{rope}" if ROW_FORMATS[name].latent else "gqa8x2-d64"
    word = name.replace("_", "")
    selects = "-sel16" if ROW_FORMATS[name].latent else ""
    case = parse_case(f"decode-{heads}-bf16-p16-k17.32-shuffled-halfway-kv{word}{selects}-b2prod")
    packed = ROW_FORMATS[name].of(layers_of(case)[0])
    keys = torch.randn(32, packed.width, generator=torch.Generator().manual_seed(5)).bfloat16()
    return packed, with_halfway_numbers(packed, keys)


def test_formats_of_fp8_have_a_rule_and_those_whose_stores_differ_have_none() -> None:
    assert WITH_RULE == [
        "fp8_ds_mla", "fp8_ds_mla_pow2", "fp8_ds_mla_v4", "fp8_ds_mla_v41", "fp8_per_head", "fp8_per_token_head",
        "nvfp4_ds_mla",
    ]  # fmt: skip


@pytest.mark.parametrize("name", WITH_RULE)
def test_each_quotient_is_exactly_between_two_numbers_and_packed_as_the_even_one(name: str) -> None:
    packed, keys = rows_of(name)
    plane = next(each for each in packed.format.planes if each.halfway)
    scales = packed.scales_of(plane)
    unit = 2.0**-8 if scales else 1.0
    if scales:
        assert (packed.scales(scales, keys) == unit).all()
        assert (packed.exact_scales(scales, keys) * (1 / unit) <= 1).all()
    quotients = in_tiles(keys[..., packed.part(plane)].float(), scales.tile if scales else 0) / unit
    quotients = (quotients[..., :-1] if scales else quotients).abs()
    stored = quotients.to(E4M3)
    codes = stored.view(torch.uint8)
    assert (codes % 2 == 0).all()
    up = (stored.float() > quotients).float().mean()
    assert 0.3 < up < 0.7, "truncation and rounding away from zero both differ"
    near = torch.where(stored.float() > quotients, codes - 1, codes + 1).view(E4M3).float()
    assert torch.equal((near + stored.float()) / 2, quotients)
    assert quotients.min() == 2.0**-10 if scales else quotients.min() < 2.0**-8, "subnormal numbers are among them"


@pytest.mark.parametrize("name", WITH_RULE)
def test_scales_and_quotients_are_the_same_by_division_and_by_reciprocals(name: str) -> None:
    packed, keys = rows_of(name)
    scales = packed.scales_of(next(each for each in packed.format.planes if each.halfway))
    if scales is None:
        return
    tiles = in_tiles(keys[..., packed.part(scales)].float(), scales.tile)
    largest = tiles.abs().amax(-1, keepdim=True)
    if scales.rule == "amax":
        assert torch.equal(largest / 448, largest * (1 / 448))
    scale = packed.scales(scales, keys)[..., None]
    assert torch.equal(tiles / scale, tiles * (1 / scale))


@pytest.mark.parametrize("case", [STORED, BY_HEAD])
def test_half_away_from_zero_fails_with_halfway_numbers_and_passes_others(case: str) -> None:
    fault = entry_of("rows-rounded-half-away-from-zero").backend
    found = check_backend(fault, cases=[case], device="cpu", diagnose="none")
    assert {finding.check for each in found if each.case == case for finding in each.findings} >= {"writes-own-kv"}
    assert not check_backend(fault, cases=[case.replace(HALFWAY, "gauss")], device="cpu", diagnose="none").failures
    assert not check_backend(entry_of("row-formats").backend, cases=[case], device="cpu", diagnose="none").failures


def test_a_store_by_reciprocals_rounds_to_even_too() -> None:
    good = entry_of("row-formats-stored-by-reciprocals").backend
    assert not check_backend(good, cases=[STORED], device="cpu", diagnose="none").failures


@pytest.mark.parametrize("mode", list(ForwardMode))
def test_core_of_decode_and_extend_has_a_case_of_each_declared_format_with_a_rule(mode: ForwardMode) -> None:
    found = [
        case for case in generate(entry_of("row-formats").backend.capabilities, mode, "core") if case.data == HALFWAY
    ]
    stores = mode in (ForwardMode.DECODE, ForwardMode.EXTEND)
    assert [case.kv_dtype for case in found] == (["fp8_per_head", "fp8_per_token_head"] if stores else [])


INTEGERS = STORED.replace("kvfp8pertokenhead", "kvint8pertokenhead")


@pytest.mark.parametrize("name", ["int8_per_token_head", "int8_per_token_head_apart", "int4_group8"])
@pytest.mark.parametrize("ties", TIES)
def test_quotients_of_signed_integers_are_packed_by_the_declared_rule(name: str, ties: str) -> None:
    assert not ROW_FORMATS[name].rounds_halfway
    layer = layers_of(parse_case(INTEGERS))[0]
    packed = ROW_FORMATS[name].with_ties(ties).of(layer)
    assert packed.format.rounds_halfway
    keys = torch.randn(32, packed.width, generator=torch.Generator().manual_seed(5)).bfloat16()
    keys = with_halfway_numbers(packed, keys)
    plane = packed.format.planes[0]
    scales = packed.scales_of(plane)
    assert scales is not None
    assert (packed.scales(scales, keys) == 2.0**-8).all()
    quotients = packed.quotients(plane, keys)[..., :-1]
    assert (quotients.abs() % 1 == 0.5).all()
    stored = in_tiles(packed.unpack(packed.pack(keys)) * 2.0**8, scales.tile)[..., :-1]
    if ties == "even":
        assert (stored % 2 == 0).all()
    else:
        assert torch.equal(stored.abs(), quotients.abs() + (0.5 if ties == "away" else -0.5))


UP = {"even": (1, 3, 5), "away": range(7), "toward_zero": ()}
"""Rule -> middles of FP4 that are rounded up, by the place of the number below them."""


@pytest.mark.parametrize("name", ["nvfp4", "fp4_mx_block16"])
@pytest.mark.parametrize("ties", TIES)
def test_quotients_of_fp4_are_packed_by_the_declared_rule(name: str, ties: str) -> None:
    layer = layers_of(parse_case(FP4_BOTH.format(name.replace("_", ""))))[0]
    packed = ROW_FORMATS[name].with_ties(ties).of(layer)
    keys = torch.randn(64, packed.width, generator=torch.Generator().manual_seed(5)).bfloat16()
    scale = 0.5 if name == "nvfp4" else 1.0
    keys = with_halfway_numbers(packed, keys, scale).float() / scale
    scales = packed.scales_of(packed.format.planes[0])
    assert scales is not None
    assert (packed.scales(scales, keys) == 0.25).all()
    quotients = packed.quotients(packed.format.planes[0], keys)[..., :-1]
    assert set(quotients.abs().unique().tolist()) == set(FP4_TIES)
    assert (quotients < 0).any()
    stored = in_tiles(packed.unpack(packed.pack(keys)) * 4, 16)[..., :-1]
    sizes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for place, middle in enumerate(FP4_TIES):
        found = stored[quotients.abs() == middle].abs().unique().tolist()
        assert found == [sizes[place + (place in UP[ties])]]


def test_formats_with_one_rule_have_it_whatever_is_declared() -> None:
    for name in ("fp8_per_token_head", "int8_zeros_per_token_head"):
        assert ROW_FORMATS[name].with_ties("away") is ROW_FORMATS[name]


def test_core_has_halfway_integers_only_if_a_rule_is_declared() -> None:
    declared = entry_of("integer-ties-round-up").backend.capabilities
    name = "int8_per_token_head"
    for rules, names in (({name: "even"}, [name]), ({name: "away"}, [name]), ({"nvfp4": "even"}, [])):
        found = generate(declared.with_changes(kv_pool={"ties": rules}), ForwardMode.DECODE, "core")
        assert [case.kv_dtype for case in found if case.data == HALFWAY] == names


@pytest.mark.parametrize(
    ("ties", "text"),
    [
        ({"nvfp": "even"}, "did you mean 'nvfp4'"),
        ({"fp8_per_head": "even"}, "unknown format of ties"),
        ({"nvfp4": "evn"}, "did you mean 'even'"),
        ("even", "write {'nvfp4': 'even'}"),
    ],
)
def test_a_rule_that_cannot_be_declared_is_refused(ties: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KVPools(ties=ties)


@pytest.mark.parametrize(
    ("slug", "name", "text"),
    [
        ("fp4-rounded-by-thresholds", "nvfp4", ""),
        ("fp4-rounded-by-thresholds", "fp4_mx_block16", ""),
        ("fp4-ties-round-away", "nvfp4", "away from zero"),
        ("fp4-thresholds-that-truncate", "fp4_mx_block16", "nearer to zero"),
    ],
)
def test_a_store_of_fp4_passes_only_if_it_rounds_as_it_declares(slug: str, name: str, text: str) -> None:
    case = FP4_BOTH.format(name.replace("_", ""))
    found = check_backend(entry_of(slug).backend, cases=[case], device="cpu", diagnose="none", executions=["eager"])
    failed = {finding.check: finding for each in found if each.case for finding in each.findings}
    assert ("writes-own-kv" in failed) == bool(text)
    assert text in str(failed.get("writes-own-kv", ""))
    assert any(each.case == case for each in found)


@pytest.mark.parametrize("slug", ["row-formats-stored-by-reciprocals", "integer-ties-round-up"])
def test_a_store_that_rounds_integers_as_it_declares_passes_and_another_fails(slug: str) -> None:
    entry = entry_of(slug)
    found = check_backend(entry.backend, cases=[INTEGERS], device="cpu", diagnose="none", executions=["eager"])
    failed = {finding.check for each in found if each.case for finding in each.findings}
    assert ("writes-own-kv" in failed) == (entry.kind == "fault")
    assert any(each.case == INTEGERS for each in found)
