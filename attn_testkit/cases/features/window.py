"""The sliding window of a layer, and how the windows of a model's layers may differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...contract import LAYER_WINDOWS, BackendContext, Capabilities, ForwardMode
from ...glossary import Entry
from ..fields import Changes, Fields
from ..layers import PERIOD, varies
from .feature import Asked, Bound, Columns, Covered, Draws, Feature, OnLayers, Row, Trait, Word, of_number, option
from .numbers import nearer_numbers
from .outside import with_layers
from .rows import keys_of

_WINDOWS = (0, 4, 11, 46, 4000)
"""46: W + 1 keys end just below a multiple of 16, and W + the rows of a request end after it."""
_MOST_RANDOM = 80


def branches(tree: object) -> bool:
    """True for rows in a tree that branches: only backends that declare ``Windows.in_trees`` combine such a tree with a
    window."""
    return getattr(tree, "topk", 1) > 1


def _write(case: Fields) -> str:
    if case.window < 0:
        return ""
    return f"w{case.window}{'' if case.layer_windows == 'any' else case.layer_windows}"


def _phrase(case: Fields) -> str:
    if case.window < 0:
        return ""
    if case.layer_windows == "same" or case.layers.count == 1:
        return f"the last {case.window} keys before a row, in all layers"
    if case.layers.varied:
        return f"{', '.join(str(w) if w >= 0 else 'none' for w in _varied(case))} keys back, layer by layer"
    turns = case.layers.turns
    return f"{case.window} keys back, in {turns}" + ("; the others have none" if case.layer_windows == "one" else "")


def _declared(declared: Capabilities, case: Fields) -> bool:
    if case.window < 0:
        return True
    wider = LAYER_WINDOWS.index(declared.windows.layers) <= LAYER_WINDOWS.index(case.layer_windows)
    return case.mode in declared.windows.modes and case.window >= declared.windows.smallest and wider


def _fit(declared: Capabilities, case: Fields) -> Changes:
    if case.window < 0:
        return {"layer_windows": "any"}
    return {"window": max(case.window, declared.windows.smallest), "layer_windows": declared.windows.layers}


def _columns(declared: Capabilities, mode: ForwardMode) -> list[int]:
    windows = dict.fromkeys(max(window, declared.windows.smallest) for window in _WINDOWS)
    return [-1, *windows] if mode in declared.windows.modes else [-1]


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    if branches(row.get("tree")) and not declared.windows.in_trees:
        return {"window": -1}
    # Every window but none: another layer has none.
    windows = _columns(declared, so_far["rows"].mode)[1:]
    if not varies(row) or row["window"] >= 0 or not windows:
        return {}
    return {"window": windows[so_far["prefixes"][0] % len(windows)]}


def _windowed(case: Fields) -> bool:
    return case.window >= 0 and case.window + 1 < max(keys_of(case))


def _in_trees(declared: Capabilities, mode: ForwardMode) -> bool:
    trees = mode is ForwardMode.TARGET_VERIFY and min(declared.bounds.max_topk, declared.bounds.max_q_rows - 1) > 1
    return trees and mode in declared.windows.modes and declared.windows.in_trees


def _smaller(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    if case.window > declared.windows.smallest:
        yield {"window": declared.windows.smallest}
        yield from ({"window": window} for window in nearer_numbers(case.window, declared.windows.smallest))


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    fits = declared.windows.in_trees or not branches(getattr(so_far["rows"], "tree", None))
    if so_far["rows"].mode not in declared.windows.modes or not fits or not draws.one_of([False, True]):
        return {}
    return {"window": draws.number(declared.windows.smallest, max(_MOST_RANDOM, declared.windows.smallest))}


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if context.modes <= declared.windows.modes:
        return None
    return "a sliding window", with_layers(context, sliding_window_size=4)


def _takes_windows(declared: Capabilities, context: BackendContext) -> bool:
    return context.modes <= declared.windows.modes and (context.topk <= 1 or declared.windows.in_trees)


def _narrower(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if not declared.windows.smallest or not _takes_windows(declared, context):
        return None
    window = declared.windows.smallest - 1
    return f"a sliding window of size {window}", with_layers(context, sliding_window_size=window)


def _two(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if declared.windows.layers == "any" or len(context.layers) < 2 or not _takes_windows(declared, context):
        return None
    first = max(declared.windows.smallest, 4)
    other = first + 1 if declared.windows.layers == "one" else -1
    by_turns = (replace(each, sliding_window_size=(first, other)[at % 2]) for at, each in enumerate(context.layers))
    return f"layers with sliding windows {first} and {other}", replace(context, layers=tuple(by_turns))


def _varied(case: Fields) -> list[int]:
    """The window of each layer: the case's, none, and wider ones, in turn from some layer on."""
    wider = [window for window in (*_WINDOWS, 2 * case.window + 3) if window > case.window]
    windows = [case.window, -1, *(wider if case.layer_windows == "any" else [])]
    return [windows[turn % len(windows)] for turn in case.layers.turns_from(case.derived("narrowest-layer"))]


def _layers(case: Fields) -> Sequence[Changes]:
    return [{"sliding_window_size": window} for window in windows_of(case)]


def windows_of(case: Fields) -> list[int]:
    """The window of each layer, -1 for none. If options do not vary, layers alternate: either kind may have the case's
    window, and sometimes the other kind has a wider one.
    """
    windows = [case.window, case.window]
    if case.window >= 0 and case.layer_windows != "same" and case.layers.varied:
        return _varied(case)
    if case.window >= 0 and case.layer_windows != "same" and case.layers.count > 1:
        wider = case.layer_windows == "any" and case.derived("other-window")
        windows[1 - case.derived("windowed-layer")] = 2 * case.window + 3 if wider else -1
    return [windows[place % PERIOD] for place in range(case.layers.count)]


def _wrong(case: Fields) -> str:
    if case.layer_windows in LAYER_WINDOWS and (case.layer_windows == "any" or case.window >= 0):
        return ""
    return f"layer_windows {case.layer_windows!r}: one of {LAYER_WINDOWS}, and 'any' without a window"


WINDOW = Feature(
    name="window",
    order=160,
    fields=("window", "layer_windows"),
    option=True,
    traits=(Trait("sliding window", lambda case: case.window >= 0), Trait("no window", lambda case: case.window < 0)),
    wrong=_wrong,
    words=(
        Word(
            r"w(\d+)(one|same)?",
            lambda match, so_far: {"window": int(match[1]), "layer_windows": match[2] or "any"},
            _write,
            bounds=(Bound("window", 0, 1 << 24),),
        ),
    ),
    explained=(
        Entry(
            "w11",
            "A sliding window in every second layer: a row at position p sees the keys from p - 11 to p.",
            also=("sliding window", "window"),
            numbers=True,
        ),
        Entry("w11one", "A sliding window in every second layer. The other layers have none.", numbers=True),
        Entry("w11same", "A sliding window in all layers.", numbers=True),
    ),
    describe=lambda case: {"window": _phrase(case)},
    declared=(
        Asked(lambda case: f"sliding window {case.window} ({case.layer_windows})", _declared),
        Asked(
            lambda case: "a sliding window with a branching tree",
            lambda declared, case: declared.windows.in_trees or case.window < 0 or not branches(case.tree),
        ),
    ),
    fit=_fit,
    values=Columns(lambda declared, mode, tier: {"window": _columns(declared, mode)}, _of_row, {"window": ()}),
    covered=(
        option("sliding window", lambda declared, mode: mode in declared.windows.modes, _windowed),
        option("sliding window in trees", _in_trees, lambda case: _windowed(case) and branches(case.tree)),
        # The smallest, if it is not the usual one.
        Covered(
            "window",
            "sliding window of size",
            lambda declared, mode: {declared.windows.smallest} - {0} if mode in declared.windows.modes else (),
            lambda declared, case: case.window if _windowed(case) else None,
            lambda declared, case, window: {
                "window": window,
                "prefixes": (max(case.prefixes[0], window + 1), *case.prefixes[1:]),
            },
        ),
    ),
    simpler=of_number(
        "window",
        "layer_windows",
        value=lambda case: "none" if case.window < 0 else f"{case.window}{case.layer_windows.removeprefix('any')}",
        steps=_smaller,
    ),
    undeclared=(_undeclared, _narrower, _two),
    random=_random,
    varies="layer",
    apply=(OnLayers(_layers),),
)
