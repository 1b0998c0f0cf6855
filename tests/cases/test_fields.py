"""A case is made of values by name: no value is lost on the way, and no name is invented."""

from __future__ import annotations

import pickle
from dataclasses import MISSING, replace

import pytest

from attn_testkit.cases.case import Case, Heads, parse_case
from attn_testkit.cases.fields import DEFAULTS

CASE = parse_case(
    "decode-gqa4x2-d64-bf16-p16-k5.9-interleaved-shifted-kvfp8e4m3-kvhnd-w7one-cap1.5-sink-lsepages2merged-b3nan-s4"
)
OTHER = {
    "rows": None, "heads": Heads("gqa", 8, 4), "head_dim": 32, "dtype": "fp16", "rope_dim": 8, "page_size": 1,
    "kv_dtype": "same", "kv_layout": "nhd", "prefixes": (1, 1), "layout": "shared", "bucket": 5, "padding": "stale",
    "window": 9, "layer_windows": "same", "usual_scaling": True, "logit_cap": 2.0, "sinks": False,
    "kv_splits": "prefix", "merged_by_backend": False, "data": "gauss", "multi_mode": False, "seed": 7,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OTHER.keys() - {"rows", "multi_mode"}))
def test_a_change_of_one_value_changes_that_value_alone(name: str) -> None:
    # Keys that are wider than values have memory of their own.
    case = CASE.with_changes(kv_layout="nhd") if name == "rope_dim" else CASE
    changed = case.with_changes(**{name: OTHER[name]})
    assert getattr(changed, name) == OTHER[name] != getattr(case, name)
    assert {each for each, value in changed.values.items() if value != case.values[each]} == {name}
    assert changed == replace(case, **{name: OTHER[name]})
    assert changed != case
    assert changed.with_changes(**{name: getattr(case, name)}) == case


def test_only_what_every_case_says_has_no_default() -> None:
    assert {name for name, value in DEFAULTS.items() if value is MISSING} == {
        "rows", "heads", "head_dim", "dtype", "page_size", "prefixes",
    }  # fmt: skip


def test_a_name_that_no_case_has_and_a_value_that_lacks_are_said() -> None:
    with pytest.raises(TypeError, match="windows"):
        CASE.with_changes(windows=3)
    with pytest.raises(TypeError, match="page_size"):
        Case(CASE.rows, CASE.heads, 64, "bf16", prefixes=(1,), kv_dtype="same")


def test_equal_cases_are_one_key_whatever_was_asked_of_them_before() -> None:
    again = parse_case.__wrapped__(CASE.id)
    assert again is not CASE
    assert (hash(again), again, again.digest) == (hash(CASE), CASE, CASE.digest)
    assert pickle.loads(pickle.dumps(CASE)) == CASE
