"""The data pattern: what queries, keys and values are drawn from. See ``steps/patterns.py``."""

from __future__ import annotations

from ..state import STATE_DATA
from .feature import Columns, Feature, Trait, Without, listed_word, no_capability, of_fields

DATA = ("gauss", "shifted", "peaked", "negative", "mean", "one_hot", "rising_logits")
"""Patterns of any case."""
EXTREME_DATA = (
    "saturated",
    "large_and_small_values",
    "large_queries",
    "large_and_small_queries",
    "fp16_overflow",
    "beyond_fp16",
    "small_weights",
)
"""Patterns of magnitude, of the cases of ``catalogue/extremes.py`` only: they show nothing but what they are for."""
CODES = "plus_minus_one"
"""Pattern of the cases that count keys: see ``catalogue/code_cases.py``."""
EQUAL_LOGITS = ("mean", "negative")
"""Patterns that show no error of a query or a key: their cases cover nothing that is declared."""
REVEALING = ("gauss", "shifted", "one_hot")
"""Each shows every wrong key, position and head, and no kernel finds it hard: replays have them in turn, and a pattern
of large logits only where a case names it."""
_ALL = (*DATA, *EXTREME_DATA, CODES, *STATE_DATA)

DATA_PATTERN = Feature(
    name="data",
    order=130,
    fields=("data",),
    traits=(Trait("data that count keys", lambda case: case.data == "plus_minus_one"),),
    words=(listed_word(_ALL, "data"),),
    describe=lambda case: {"data": case.data},
    values=Columns(
        lambda declared, mode, tier: {"data": list(DATA)},
        inside={"data": ("page_size", "dtype", "kv_dtype", "layout")},
    ),
    simpler=of_fields("data"),
    random=lambda draws, declared, so_far: {"data": draws.one_of(DATA)},
    varies="step",
    apply=Without("steps/patterns.py draws the numbers."),
    **no_capability("Numbers are not a capability: limits follow from them."),
)
