"""A feature answers everything that is asked of features, and no field of a case is without one."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, replace

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import WORDS
from attn_testkit.cases.draft import Draft
from attn_testkit.cases.features.feature import Columns, Feature, Without
from attn_testkit.cases.features.server.table import SERVER_VARIANTS
from attn_testkit.cases.features.sinks import SINKS
from attn_testkit.cases.features.table import FEATURES, forgotten
from attn_testkit.cases.fields import DEFAULTS, Fields, Heads
from attn_testkit.cases.rows import Accepted, Decode, Drafted, Extend, Verify
from attn_testkit.cases.trees import Tree, chain
from attn_testkit.catalogue import array
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode

MEMBERS = [member.name for member in fields(Feature) if member.default is MISSING]
FIELDS = Fields(Decode(), Heads("mha", 2, 2), 64, "bf16", 16, (20, 3), bucket=2)


@pytest.mark.parametrize("member", MEMBERS)
def test_a_feature_without_a_member_does_not_construct_and_the_member_is_named(member: str) -> None:
    others = {name: getattr(SINKS, name) for name in MEMBERS if name != member}
    with pytest.raises(TypeError, match=f"'{member}'"):
        Feature(**others)


def test_a_member_that_has_no_meaning_comes_with_a_reason() -> None:
    assert not list(Without("Every backend takes it."))
    with pytest.raises(ValueError, match="says why"):
        Without("")


def test_a_feature_of_a_field_that_no_case_has_is_refused_with_the_place_to_add_it() -> None:
    with pytest.raises(ValueError, match=r"no case has a field 'sink'; add it to cases/fields.py"):
        replace(SINKS, fields=("sink",))


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_field_that_no_feature_has_is_noticed(name: str) -> None:
    assert forgotten(FEATURES) == set()
    assert name in forgotten(tuple(each for each in FEATURES if name not in each.fields))


def test_each_feature_has_a_name_of_its_own() -> None:
    assert len({each.name for each in FEATURES}) == len(FEATURES)


def test_fields_without_a_name_have_nothing_that_follows_from_one() -> None:
    for ask in (lambda: FIELDS.id, lambda: FIELDS.digest, lambda: FIELDS.context_len, lambda: FIELDS.derived("data")):
        with pytest.raises(NotImplementedError, match="make a Case"):
            ask()


def test_a_new_column_is_in_the_array_of_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = TorchNativeBackend.capabilities
    before = set(array.Array(declared, ForwardMode.DECODE, "core").columns)

    def values(declared: Capabilities, mode: ForwardMode, tier: str) -> dict[str, list[bool]]:
        return {"new": [False, True]}

    monkeypatch.setattr(array, "_COLUMNS", [*array._COLUMNS, Columns(values)])
    assert set(array.Array(declared, ForwardMode.DECODE, "core").columns) == {*before, "new"}


def test_the_mode_and_the_width_follow_from_the_rows() -> None:
    verify = replace(FIELDS, rows=Verify(chain(5)))
    assert (verify.mode, verify.width, verify.new) == (ForwardMode.TARGET_VERIFY, 5, ())
    assert replace(verify, rows=Verify(Tree((0, 0)))).width == 3
    assert replace(FIELDS, rows=Drafted(Draft(2, 4))).width == 6
    accepted = replace(FIELDS, rows=Accepted((1, 4), 4))
    assert (accepted.mode, accepted.width, accepted.new) == (ForwardMode.DRAFT_EXTEND, 4, (1, 4))
    assert replace(accepted, rows=replace(accepted.rows, v2=True)).mode is ForwardMode.DRAFT_EXTEND_V2
    assert (FIELDS.mode, FIELDS.width, FIELDS.tree, FIELDS.draft) == (ForwardMode.DECODE, 1, None, None)


def test_all_requests_have_the_rows_of_the_first_where_none_are_given() -> None:
    more = replace(FIELDS, rows=Extend((3, 1), 4, chunks=2)).of_requests((1, 2, 5), padded=2, data="plus_minus_one")
    assert (more.prefixes, more.rows, more.bucket, more.data) == (
        (1, 2, 5),
        Extend((3, 3, 3), 4, chunks=2),
        5,
        "plus_minus_one",
    )
    assert FIELDS.of_requests((7,)).rows == Decode()


def test_what_goes_with_other_things_says_with_what() -> None:
    made_by_themselves = [word for word, variant in SERVER_VARIANTS.items() if not variant.combines]
    assert made_by_themselves == [
        "far",
        "shapes",
        "bigpool",
        "piecewise",
        "narrower_widths",
        "context_of_prefixes",
        "wide_scores",
        "wider_buffers",
    ]
    assert [word for word, variant in SERVER_VARIANTS.items() if not variant.reaches_kernels] == [
        "empty_batches",
        "zero_length_padding",
    ]


@pytest.mark.parametrize("mode", ForwardMode)
def test_every_word_of_an_id_is_that_of_one_feature(mode: ForwardMode) -> None:
    declared = TorchNativeBackend.capabilities
    ids = [case.id.removeprefix(f"{mode}-") for case in generate(declared, mode, "core")]
    assert len(ids) > 100
    for word in {word for each in ids for word in each.split("-")}:
        assert len([kind for kind in WORDS if re.fullmatch(kind.pattern, word)]) == 1, word
