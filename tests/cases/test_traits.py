"""What excludes what is said once, at a trait of a feature, and a feature is found in its file."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest

from attn_testkit.cases import traits
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features import found
from attn_testkit.cases.features.feature import Feature
from attn_testkit.cases.features.server.table import SERVER_VARIANTS
from attn_testkit.cases.features.server.variant import ServerVariant
from attn_testkit.cases.features.sinks import SINKS
from attn_testkit.cases.features.table import FEATURES
from attn_testkit.cases.traits import TRAITS, Trait, exclusions

PLAIN = "extend-gqa2x2-d64-bf16-p16-k5.9-n8a3.7-shuffled-gauss-{}b2prod"


def test_each_two_traits_exclude_each_other_once_and_both_exist() -> None:
    pairs = [frozenset((one, other)) for one, other, _ in exclusions()]
    assert set().union(*pairs) <= TRAITS.keys()
    assert len(set(pairs)) == len(pairs)


def test_a_case_with_two_traits_that_exclude_each_other_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"ALiBi and soft cap: FlashInfer caps the sum of logit and bias"):
        parse_case(PLAIN.format("alibi-cap1.5-"))
    assert parse_case(PLAIN.format("alibi-")).alibi
    assert parse_case(PLAIN.format("cap1.5-")).logit_cap


def test_a_trait_of_another_one_s_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traits, "TRAITS", dict(TRAITS))
    with pytest.raises(ValueError, match="two features have a trait 'sinks'; give one of them another name"):
        traits.add_traits([Trait("sinks", lambda case: case.sinks)])


def test_features_and_variants_are_in_the_order_that_they_say() -> None:
    assert [each.order for each in FEATURES] == sorted(each.order for each in FEATURES)
    assert [each.order for each in SERVER_VARIANTS.values()] == sorted(each.order for each in SERVER_VARIANTS.values())
    assert {each.name for each in FEATURES} >= {"mode", "sinks", "spans", "seed"}
    assert SERVER_VARIANTS.keys() >= {"empty_batches", "noncausal", "wide_scores"}


def test_two_of_one_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:

    one, other = ModuleType("folder.one"), ModuleType("folder.other")
    one.SINKS, other.OTHER = SINKS, replace(SINKS, name="other")  # type: ignore[attr-defined]
    monkeypatch.setattr(found, "modules_of", lambda package, *but: [one, other])
    with pytest.raises(ValueError, match=f"folder: two Features have the order {SINKS.order}; give one of them"):
        found.found_next_to("folder.table", Feature)
    other.OTHER = SINKS  # type: ignore[attr-defined]
    assert found.found_next_to("folder.table", Feature) == (SINKS,), "imported by another module"


def test_a_module_that_finds_others_does_not_import_itself() -> None:
    package = "attn_testkit.cases.features.server"
    names = {each.__name__ for each in found.modules_of(package, f"{package}.table")}
    assert f"{package}.table" not in names
    assert {f"{package}.variant", f"{package}.big_pool"} <= names
    assert all(any(isinstance(value, ServerVariant) for value in vars(sys.modules[name]).values()) for name in names
               if not name.endswith(".variant"))  # fmt: skip
