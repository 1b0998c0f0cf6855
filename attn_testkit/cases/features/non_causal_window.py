"""The meaning of a window in layers that are not causal: the keys that it leaves to a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...contract import NON_CAUSAL_WINDOWS, BackendContext, Capabilities, ForwardMode
from ...glossary import Entry
from ..fields import Changes, Fields
from .feature import Asked, Columns, Covered, Draws, Feature, OnLayers, Row, Trait, Word, of_fields
from .outside import with_layers
from .rows import keys_of
from .server.non_causal import NON_CAUSAL
from .server.table import variant_of

_WORDS = {"left": "leftofrow", "block": "leftofblock", "both": "bothsides"}
_PHRASES = {
    "left": "from W keys before the row on, later keys included",
    "block": "from W keys before the first row of the step on, for all its rows",
    "both": "from W keys before the row to W keys after it",
}
_WINDOW = 11
"""W of a case that is made for a meaning and has no window yet."""
_MOST_RANDOM = 80


def _declares(declared: Capabilities, mode: ForwardMode) -> bool:
    return mode in declared.windows.modes & declared.options.non_causal


def _meanings(declared: Capabilities, mode: ForwardMode) -> list[str]:
    return [each for each in NON_CAUSAL_WINDOWS if each in declared.windows.non_causal and _declares(declared, mode)]


def _declared(declared: Capabilities, case: Fields) -> bool:
    return case.non_causal_window in ("none", *_meanings(declared, case.mode))


def _with(declared: Capabilities, meaning: str, case: Changes) -> Changes:
    """Values of a case with this meaning: it has a window, and its layers are not causal."""
    window = case["window"] if case["window"] >= 0 else max(_WINDOW, declared.windows.smallest)
    variants = frozenset(case["variants"]) | {NON_CAUSAL.word}
    return {"non_causal_window": meaning, "window": window, "variants": variants}


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    meaning = row.get("non_causal_window", "none")
    return {} if meaning == "none" else _with(declared, meaning, {"window": -1, **so_far})


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    meanings = _meanings(declared, mode)
    return {"non_causal_window": ["none", *meanings]} if meanings else {}


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    meanings = _meanings(declared, so_far["rows"].mode)
    if not meanings or NON_CAUSAL.word not in so_far.get("variants", ()) or so_far.get("local_chunk"):
        return {}
    meaning = draws.one_of(["none", *meanings])
    window = draws.number(declared.windows.smallest, max(_MOST_RANDOM, declared.windows.smallest))
    return {} if meaning == "none" else {"non_causal_window": meaning, "window": window}


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    missing = [each for each in NON_CAUSAL_WINDOWS if each not in declared.windows.non_causal]
    if not missing or not all(_declares(declared, mode) for mode in context.modes):
        return None
    window = max(declared.windows.smallest, _WINDOW)
    asked = {"causal": False, "sliding_window_size": window, "non_causal_window": missing[0]}
    return f"a window {missing[0]!r} in layers that are not causal", with_layers(context, **asked)


def _wrong(case: Fields) -> str:
    meaning = case.non_causal_window
    if meaning not in ("none", *NON_CAUSAL_WINDOWS):
        return f"non_causal_window {meaning!r}: none or one of {NON_CAUSAL_WINDOWS}"
    if meaning != "none" and (case.window < 0 or variant_of(case).causal):
        return f"{_WORDS[meaning]} needs a window such as w11, and noncausal"
    return ""


def _layers(case: Fields) -> Sequence[Changes]:
    has = case.non_causal_window != "none"
    return [{"non_causal_window": case.non_causal_window} if has else {}] * case.layers.count


def _reset(case: Fields, minimal: Fields) -> Changes:
    """Causal layers that keep the window; without the window if no case has causal layers, as of an encoder."""
    if case.non_causal_window == minimal.non_causal_window:
        return {}
    if NON_CAUSAL.word in minimal.variants:
        return {"non_causal_window": "none", "window": -1, "layer_windows": "any"}
    return {"non_causal_window": "none", "variants": case.variants - {NON_CAUSAL.word}}


NON_CAUSAL_WINDOW = Feature(
    name="window of non-causal layers",
    order=335,
    fields=("non_causal_window",),
    option=True,
    traits=(
        Trait(
            "window without a meaning for later keys",
            lambda case: case.window >= 0 and case.non_causal_window == "none",
            excludes={NON_CAUSAL.word: "a window of layers that are not causal needs a declared meaning"},
        ),
    ),
    wrong=_wrong,
    words=(
        Word(
            "|".join(_WORDS.values()),
            lambda match, so_far: {"non_causal_window": next(m for m, word in _WORDS.items() if word == match[0])},
            lambda case: _WORDS.get(case.non_causal_window, ""),
            spelled=tuple(_WORDS.values()),
        ),
    ),
    explained=(
        Entry(
            "leftofrow",
            "The window of layers that are not causal ends only on the left: a row at position p sees the keys from "
            "p - W on, and all later ones.",
            also=("window of non-causal layers",),
        ),
        Entry(
            "leftofblock",
            "The window of layers that are not causal begins W keys before the first row of the step. All rows of a "
            "request see the same keys.",
        ),
        Entry(
            "bothsides",
            "The window of layers that are not causal has two sides: a row at position p sees the keys from p - W to "
            "p + W.",
            also=("bidirectional window",),
        ),
    ),
    describe=lambda case: {"window of non-causal layers": _PHRASES.get(case.non_causal_window, "")},
    declared=(Asked(lambda case: f"a window {case.non_causal_window!r} in layers that are not causal", _declared),),
    values=Columns(
        _columns,
        _of_row,
        meets={"non_causal_window": ("window", "prefixes", "new_tokens")},
        further=("non_causal_window",),
    ),
    covered=(
        Covered(
            "non_causal_window",
            "non-causal window with the meaning",
            _meanings,
            lambda declared, case: (
                case.non_causal_window
                if case.non_causal_window != "none" and case.window + 1 < max(keys_of(case))
                else None
            ),
            lambda declared, case, meaning: {
                **_with(declared, meaning, {"window": case.window, "variants": case.variants}),
                "prefixes": (max(case.prefixes[0], max(_WINDOW, case.window) + 1), *case.prefixes[1:]),
            },
        ),
    ),
    simpler=of_fields(
        "non_causal_window",
        value=lambda case: case.non_causal_window,
        reset=_reset,
    ),
    undeclared=(_undeclared,),
    random=_random,
    varies="instance",
    apply=(OnLayers(_layers),),
)
