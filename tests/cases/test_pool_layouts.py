"""Layouts of the KV pool among the cases: none for who declares the usual one alone, each of the others somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.catalogue.not_covered import describe_not_covered, not_covered
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import KV_LAYOUTS, Capabilities, ForwardMode, KVPool, KVPools
from attn_testkit.examples import MinimalBackend

CAPABILITIES = MinimalBackend.capabilities
ALL = CAPABILITIES.with_changes(kv_pool={"kv_layouts": KV_LAYOUTS, "kv_dtypes": {"same", "fp8_e4m3"}})
OTHERS = [name for name in KV_LAYOUTS if name != "nhd"]


def others(mode: ForwardMode, tier: str, declared: Capabilities = ALL) -> list[Case]:
    return [case for case in generate(declared, mode, tier) if case.kv_layout != "nhd"]


@pytest.mark.parametrize("mode", ForwardMode)
def test_smoke_has_other_layouts_and_at_most_a_case_more_for_them(mode: ForwardMode) -> None:
    assert not others(mode, "smoke", CAPABILITIES)
    more = generate(CAPABILITIES.with_changes(kv_pool={"kv_layouts": {"nhd", "hnd", "custom"}}), mode, "smoke")
    assert {case.kv_layout for case in more} == {"nhd", "hnd", "custom"}
    assert len(more) - len(generate(CAPABILITIES, mode, "smoke")) <= 1


def test_smoke_tries_each_layout_where_strides_of_pages_and_heads_matter() -> None:
    found = [case for mode in ForwardMode for case in others(mode, "smoke")]
    assert {
        case.kv_layout for case in found if max(case.prefixes) > case.page_size > 1 and case.heads.kv_heads > 1
    } == set(OTHERS)


@pytest.mark.parametrize("mode", ForwardMode)
def test_core_tries_each_layout_with_each_kv_dtype_head_layout_and_page_size(mode: ForwardMode) -> None:
    wide = TorchNativeBackend.capabilities
    for name in wide.kv_pool.kv_layouts - {"nhd"}:
        found = [case for case in generate(wide, mode, "core") if case.kv_layout == name]
        assert {case.kv_dtype for case in found} == wide.kv_pool.kv_dtypes
        assert {case.dtype for case in found} == wide.precision.dtypes
        assert {case.heads.family for case in found} == wide.heads.families
        assert len({case.page_size for case in found}) >= 5
        assert [case for case in found if max(case.prefixes) > case.page_size > 1 and case.heads.kv_heads > 1]
    assert "kv_layout" not in dict(not_covered(wide, mode, generate(wide, mode, "core")))


def test_layouts_of_mla_keep_its_family_and_few_capabilities_its_only_values() -> None:
    of_mla = CAPABILITIES.with_changes(
        heads={"families": {"mla"}, "head_dims": {512}, "gqa_ratios": {16}, "mla_rope_dims": {64}},
        kv_pool={"kv_layouts": {"nhd", "hnd"}},
    )
    mqa = CAPABILITIES.with_changes(heads={"families": {"mqa"}}, kv_pool={"kv_layouts": {"nhd", "padded-pages"}})
    for declared in (of_mla, mqa):
        found = others(ForwardMode.EXTEND, "core", declared)
        assert found
        assert {case.heads.family for case in found} == declared.heads.families


def test_full_tries_each_layout_in_each_page_size() -> None:
    found = {(case.kv_layout, case.page_size) for case in others(ForwardMode.DECODE, "full")}
    assert found >= {(name, page) for name in OTHERS for page in CAPABILITIES.kv_pool.page_sizes}


@pytest.mark.parametrize("tier", ["smoke", "core"])
def test_without_the_usual_layout_most_cases_have_the_first_that_is_declared(tier: str) -> None:
    found = generate(CAPABILITIES.with_changes(kv_pool={"kv_layouts": {"custom", "hnd"}}), ForwardMode.DECODE, tier)
    assert {case.kv_layout for case in found} == {"hnd", "custom"}
    assert sum(case.kv_layout == "hnd" for case in found) > len(found) / 2
    assert generate(CAPABILITIES.with_changes(kv_pool={"kv_layouts": ()}), ForwardMode.DECODE, tier) == ()


def test_modes_that_share_an_instance_share_its_pool() -> None:
    case = parse_case("decode-gqa2x2-d32-bf16-p4-k0.5.20-shuffled-gauss-kvhnd-b3prod-multi_mode")
    assert {other.kv_layout for other in co_residents(case, set(ForwardMode), 8)} == {"hnd"}


def test_a_layout_is_tried_where_it_differs_from_others() -> None:
    declared = CAPABILITIES.with_changes(kv_pool={"kv_layouts": {"nhd", "hnd"}})
    minimal = "decode-{heads}-d64-bf16-p{page}-k{keys}-shuffled-gauss-kvhnd-b1prod"

    def lacking(heads: str = "gqa2x2", page: int = 16, keys: int = 16) -> bool:
        case = parse_case(minimal.format(heads=heads, page=page, keys=keys))
        return ("kv_layout", "hnd") in not_covered(declared, ForwardMode.DECODE, [case])

    assert not lacking()
    assert lacking(keys=15), "one page"
    assert lacking(heads="mqa4"), "one KV head"
    assert lacking(page=1), "one slot a page"
    assert "KV layout hnd" in describe_not_covered(
        declared, [ForwardMode.DECODE], generate(CAPABILITIES, ForwardMode.DECODE, "core")
    )


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"side_by_side"}, "unknown kv_layouts 'side_by_side'; did you mean 'side-by-side'?"),
        ("hnd", "kv_layouts must be a set or list of values, got 'hnd'; write {'hnd'}"),
    ],
)
def test_what_is_no_layout_is_answered(layouts: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Capabilities(eager={ForwardMode.DECODE}, kv_pool=KVPools(kv_layouts=layouts))  # type: ignore[arg-type]


def test_the_page_and_the_pool_list_every_layout() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "kv-layouts.md").read_text()
    assert tuple(re.findall(r"^\| `([\w-]+)` \|", page, re.M)) == KV_LAYOUTS
    table = (KVPool.__doc__ or "").split("``get_layer_buffer``")[1]
    assert tuple(re.findall(r"^    ``([\w-]+)`` ", table, re.M)) == KV_LAYOUTS


def test_a_misspelt_layout_of_an_id_is_answered() -> None:
    with pytest.raises(ValueError, match="cannot read 'kvhdn'; did you mean 'kvhnd'"):
        parse_case("decode-gqa2x2-d64-bf16-p16-k16-shuffled-gauss-kvhdn-b1prod")
