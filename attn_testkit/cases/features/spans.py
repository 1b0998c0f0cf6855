"""Bidirectional spans: rows of an image, or of a block of a diffusion model, see each other in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...contract import BackendContext, Capabilities, ForwardMode
from ...glossary import Entry
from ..fields import Changes, Fields
from ..spans import SPANS_PATTERN, Span, SpanShape, spans_of_request
from .feature import Asked, Columns, Feature, OnLayers, Trait, Word, of_fields, option
from .outside import with_layers
from .window import windows_of


def spans_in(case: Fields, turn: int, prefix: int, new: int, seed: int) -> tuple[Span, ...]:
    """Bidirectional spans of a request of a step; in decode the spans of its prompt."""
    if case.spans is None:
        return ()
    windows = [w for w, has in zip(windows_of(case), _having(case), strict=True) if has and w >= 0]
    shape, window = case.spans, min(windows, default=-1)
    if case.mode is ForwardMode.EXTEND:
        return spans_of_request(shape, turn, prefix, new, window, seed)
    return spans_of_request(replace(shape, of_prefix=False), turn, 0, max(prefix, 1), window, seed) if prefix else ()


def _having(case: Fields) -> list[bool]:
    """Flags of the layers: True for one with spans. If layers differ, those with a window have them, as in Gemma 4."""
    if case.spans is None or not case.spans.by_layer:
        return [case.spans is not None] * case.layers.count
    windowed = [window >= 0 for window in windows_of(case)]
    return windowed if len(set(windowed)) > 1 else [place % 2 == 0 for place in range(case.layers.count)]


def _layers(case: Fields) -> Sequence[Changes]:
    return [{"bidirectional_spans": True} if has else {} for has in _having(case)]


def _phrase(case: Fields) -> str:
    if case.spans is None:
        return ""
    having = ", ".join(case.layers.name(place) for place, has in enumerate(_having(case)) if has)
    where = "in the prefix and the new rows" if case.spans.of_prefix else "in the new rows"
    wide = ", some wider than the window" * case.spans.wide
    return f"{where}{wide}" + (f"; only in {having}" if case.spans.by_layer else "")


def _declared(declared: Capabilities, case: Fields) -> bool:
    each, spans = case.spans, declared.spans
    return each is None or (
        case.mode in spans.modes
        and each.of_prefix <= spans.of_prefix
        and each.wide <= spans.wider_than_window
        and each.by_layer <= spans.by_layer
    )


def _simpler(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    if case.spans is not None:
        for name in ("wide", "of_prefix", "by_layer"):
            if getattr(case.spans, name):
                yield {"spans": replace(case.spans, **{name: False})}


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    """Columns for spans in the rows of the step, and for spans of every declared kind; decode has only the second."""
    spans = declared.spans
    if mode not in spans.modes:
        return {}
    extends = mode is ForwardMode.EXTEND
    wide = spans.wider_than_window and mode in declared.windows.modes
    most = SpanShape(spans.of_prefix and extends, wide, spans.by_layer)
    return {"spans": [None, *dict.fromkeys([SpanShape(), most] if extends else [most])]}


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if context.modes <= declared.spans.modes:
        return None
    causal = with_layers(context, bidirectional_spans=True, causal=True, attention_chunk_size=0, alibi_slopes=None)
    return "bidirectional spans", replace(causal, max_spans=1)


def _undeclared_by_layer(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if not context.modes <= declared.spans.modes or declared.spans.by_layer or len(context.layers) < 2:
        return None
    layers = tuple(
        replace(layer, bidirectional_spans=place == 0, causal=True) for place, layer in enumerate(context.layers)
    )
    return "bidirectional spans in one layer", replace(context, layers=layers, max_spans=1)


def _context(schedules: Sequence[Any]) -> Changes:
    """The most spans of a request in any step, and 1 or more if a case has any."""
    found = [
        max(1, *(len(request.spans) for step in each.every_step for request in step.requests))
        for each in schedules
        if each.case.spans
    ]
    return {"max_spans": max(found, default=0)}


def _eager_only(declared: Capabilities, case: Fields) -> str:
    return "not declared: bidirectional spans in graphs" if case.spans and not declared.spans.in_graphs else ""


SPANS = Feature(
    name="spans",
    order=200,
    fields=("spans",),
    option=True,
    traits=(
        Trait(
            "bidirectional spans",
            lambda case: case.spans is not None,
            excludes={
                "cross-attention layers": "images are either inputs of the encoder or part of the prompt",
                "noncausal": "every row sees all keys already",
                "heads with their own scaling": "no model has both",
                "chunked-local layers": "no model has both, so no server defines how they combine",
                "ALiBi": "a bias of keys that follow a row differs between servers",
                "selected keys": "models with an indexer are causal",
                "multi-mode instance": "the other modes of the instance have no prompt with an image",
                "additive bias": "a bias hides the rows that follow a row",
            },
        ),
    ),
    context=_context,
    eager_only=_eager_only,
    words=(
        Word(
            SPANS_PATTERN,
            lambda match, so_far: {"spans": SpanShape.read(match)},
            lambda case: str(case.spans or ""),
            spelled=("spans",),
        ),
    ),
    explained=(
        Entry(
            "spans",
            "Bidirectional spans: rows of an image, or of a block of a diffusion model, see each other in "
            "both directions. Other rows are causal.",
            also=("bidirectional span", "image span", "mm_prefix_range", "prefix LM"),
            page="how-to/spans.md",
        ),
        Entry(
            "spansprefix",
            "Some spans are in the prefix, or begin there and end in the new rows.",
            page="how-to/spans.md",
        ),
        Entry("spanswide", "Some spans have more positions than a window, which narrows them.", page="how-to/spans.md"),
        Entry(
            "spansbylayer",
            "Some layers have bidirectional spans and the others are causal: those with a window, as in Gemma"
            " 4, or every second one.",
            page="how-to/spans.md",
        ),
    ),
    describe=lambda case: {"bidirectional spans": _phrase(case)},
    declared=(Asked(lambda case: f"bidirectional spans {_phrase(case)}", _declared),),
    values=Columns(_columns, meets={"spans": ("prefixes", "new_tokens", "window")}, further=("spans",)),
    covered=(
        option(
            "bidirectional spans",
            lambda declared, mode: mode in declared.spans.modes,
            lambda case: case.spans is not None,
        ),
        option(
            "spans that begin in the prefix",
            lambda declared, mode: mode in declared.spans.modes and declared.spans.of_prefix,
            lambda case: case.spans is not None and (case.spans.of_prefix or case.mode is ForwardMode.DECODE),
        ),
        option(
            "spans wider than the window",
            lambda declared, mode: (
                mode in declared.spans.modes & declared.windows.modes and declared.spans.wider_than_window
            ),
            lambda case: case.spans is not None and case.spans.wide and case.window >= 0,
        ),
        option(
            "layers with and without spans",
            lambda declared, mode: mode in declared.spans.modes and declared.spans.by_layer,
            lambda case: case.spans is not None and case.spans.by_layer,
        ),
    ),
    simpler=of_fields("spans", steps=_simpler),
    undeclared=(_undeclared, _undeclared_by_layer),
    varies="layer",
    apply=(OnLayers(_layers),),
)
