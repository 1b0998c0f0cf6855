"""The data pattern: what queries, keys and values are drawn from. See ``steps/patterns.py``."""

from __future__ import annotations

from ...glossary import Entry
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
"""Patterns of extreme magnitudes, only for the cases of ``catalogue/extremes.py``: each shows only one kind of
mistake."""
HALFWAY = "halfway"
"""Pattern of the cases of formats whose rule for quotients between two numbers is known."""
CODES = "plus_minus_one"
"""Pattern of the cases that count keys: see ``catalogue/code_cases.py``."""
EQUAL_LOGITS = ("mean", "negative")
"""Patterns that show no error of a query or a key: their cases do not count as covering a declared value."""
REVEALING = ("gauss", "shifted", "one_hot")
"""Patterns that show every wrong key, position and head, without being hard for a kernel. Replays have them in turn,
and a pattern of large logits only if the case names it."""
_ALL = (*DATA, *EXTREME_DATA, HALFWAY, CODES, *STATE_DATA)

COUNTED = "data that count keys"
"""Trait of cases whose output says how often each key was counted: keys have equal weights."""

DATA_PATTERN = Feature(
    name="data",
    order=130,
    fields=("data",),
    traits=(Trait(COUNTED, lambda case: case.data == "plus_minus_one"),),
    words=(listed_word(_ALL, "data"),),
    explained=(
        Entry(
            "data pattern",
            "The rule by which q, k and v are filled, each made to expose one kind of error.",
            also=("data",),
        ),
        Entry("mild_decay", "Each token multiplies a state by 0.4 to 0.8."),
        Entry(
            "fair_rounding",
            "Decay as mild_decay, without a convolution's rounding, for states that are rounded stochastically.",
        ),
        Entry("weak_decay", "Each token multiplies a state by 0.998, so errors of many tokens add up."),
        Entry("no_decay", "Each token multiplies a state by exactly 1."),
        Entry("strong_decay", "Each token makes a state forget all that it held."),
        Entry(
            "like_keys",
            "Keys point nearly in one direction, so that each token overwrites what the one before it stored.",
        ),
        Entry(
            "unit_keys",
            "Exact data of states: unit keys, integers and a decay of 1, so that columns of a state are "
            "values of tokens.",
        ),
        Entry(
            "exact_gates",
            "Exact data of states: each head has one row that multiplies a state by 0 or 1/2, at an end, the start or "
            "the middle of a chunk. All other rows multiply it by 1.",
        ),
        Entry(
            "near_epsilon",
            "Queries and keys of layers that divide them by their norm are so short that the epsilon of the norm "
            "changes the result.",
        ),
        Entry("gauss", "Unit normal numbers."),
        Entry(
            "shifted",
            "Keys and values with a mean: a key that is left out or counted twice moves every channel the same way.",
        ),
        Entry("peaked", "Large queries: a few keys carry the weight."),
        Entry("negative", 'All logits are equal and about -6e4: a finite "minus infinity" shows, and so does a zero.'),
        Entry("mean", "q and k are 0, so the output is the exact mean of the visible values."),
        Entry(
            "one_hot",
            "One-hot values: each channel belongs to a chosen key, so the output says which keys were attended.",
            also=("footprint", "one-hot values"),
        ),
        Entry(
            "rising_logits",
            "Logits that rise along the keys for some rows and fall for others. A maximum that comes late "
            "must rescale what was summed before.",
            also=("cliff", "rising logits"),
        ),
        Entry(
            "large_and_small_queries",
            "For backends that declare a `q_scale`: queries beyond the range of FP8, next to queries so small"
            " that FP8 makes all but one number 0.",
        ),
        Entry(
            "saturated",
            "Keys and values beyond what an FP8 pool holds: they must be cut to its largest number.",
            also=("values beyond FP8",),
        ),
        Entry(
            HALFWAY,
            "Keys and values whose quotients are exactly halfway between two numbers, in rows with scales: a store "
            "must round to the even one, and those of integers and FP4 by the declared rule.",
            also=("ties of a format", "round to nearest even"),
        ),
        Entry(
            "large_and_small_values",
            "Small values added to a large sum: an accumulator of 16 bits loses them.",
            also=("swamped", "cancellation"),
        ),
        Entry(
            "large_queries",
            "Queries near the largest number of FP8.",
            also=("loud", "large queries"),
        ),
        Entry(
            "fp16_overflow",
            "Values of which three add up to more than fp16 holds, while their mean fits.",
            also=("towering", "fp16 overflow"),
        ),
        Entry(
            "beyond_fp16",
            "bf16 keys and values beyond the range of fp16.",
            also=("colossal", "bf16 range"),
        ),
        Entry(
            "small_weights",
            "Weights that FP8 loses unless they are multiplied by a scale first.",
            also=("faint", "small weights"),
        ),
        Entry(
            "plus_minus_one",
            "Values of +1 and -1 that nearly cancel, so that the output says how often each key was counted.",
            also=("codes", "plus-minus one"),
            page="reference/checks/keys-counted-once.md",
        ),
    ),
    describe=lambda case: {"data": case.data},
    values=Columns(
        lambda declared, mode, tier: {"data": list(DATA)},
        inside={"data": ("page_size", "dtype", "kv_dtype", "layout")},
    ),
    simpler=of_fields("data"),
    random=lambda draws, declared, so_far: {"data": draws.one_of(DATA)},
    varies="step",
    apply=Without("steps/patterns.py draws the numbers."),
    **no_capability("Data are not a capability: limits follow from the numbers."),
)
