"""Layers of encoders: a row sees the rows of its own sequence in both directions, and there is no cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...contract import ENCODER_LAYERS, NON_CAUSAL_WINDOWS, BackendContext, Capabilities, ForwardMode
from ...glossary import Entry
from ..encoder_windows import WINDOWS
from ..fields import C, Changes, Fields
from ..layers import PERIOD
from ..plan import Plan
from ..rows import Extend
from .feature import Asked, Columns, Covered, Feature, OnLayers, OnSteps, Row, Trait, Word, of_fields, option
from .outside import with_layers
from .server.big_pool import BIG_POOL
from .server.non_causal import NON_CAUSAL

_WORDS = {"whole": "encoder", "windows": "encoderwindows"}
_PHRASES = {
    "whole": "all layers, whose rows see their whole sequence, without a cache",
    "windows": "all layers, without a cache; in {} a row sees only its window, of up to {} rows",
}
_DOES_NOT_COMBINE = "an encoder has no cache"


def kinds_of(declared: Capabilities, mode: ForwardMode) -> list[str]:
    """Declared kinds of encoder-only layers, in a mode that has them."""
    return [kind for kind in ENCODER_LAYERS if kind in declared.encoder_only.layers and mode is ForwardMode.EXTEND]


def encodes(declared: Capabilities, kind: str, case: Changes) -> Changes:
    """Values of a case in which layers are of this kind: no request has a prefix, and no layer is causal.

    A window needs a meaning, and is left out if none is declared.
    """
    rows = case["rows"]
    found: dict[str, Any] = {
        "encoder": kind,
        "prefixes": (0,) * len(case["prefixes"]),
        "variants": (frozenset(case.get("variants", ())) | {NON_CAUSAL.word}) - {BIG_POOL.word},
        "rows": replace(rows, chunks=1) if isinstance(rows, Extend) else rows,
    }
    if case.get("window", -1) >= 0 and case.get("non_causal_window", "none") == "none":
        meanings = [each for each in NON_CAUSAL_WINDOWS if each in declared.windows.non_causal]
        fits = meanings and kind == "whole"
        found |= {"non_causal_window": meanings[-1]} if fits else {"window": -1, "layer_windows": "any"}
    return found


def decodes(case: C) -> C:
    """The case with layers that have a cache and are causal; the same case if it has them."""
    if case.encoder == "none":
        return case
    return case.with_changes(encoder="none", non_causal_window="none", variants=case.variants - {NON_CAUSAL.word})


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    kind = row.get("encoder", "none")
    return {} if kind == "none" else encodes(declared, kind, so_far)


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    kinds = kinds_of(declared, mode)
    return {"encoder": kinds if declared.encoder_only.only else ["none", *kinds]} if kinds else {}


def _declared(declared: Capabilities, case: Fields) -> bool:
    allowed = kinds_of(declared, case.mode)
    return case.encoder in (allowed if declared.encoder_only.only else ["none", *allowed])


def _fit(declared: Capabilities, case: Fields) -> Changes:
    kinds = kinds_of(declared, case.mode)
    if not declared.encoder_only.only or case.encoder != "none" or not kinds:
        return {}
    return encodes(declared, kinds[0], case.values | {"rows": case.rows})


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    missing = [kind for kind in ENCODER_LAYERS if kind not in declared.encoder_only.layers]
    if not missing or context.modes != {ForwardMode.EXTEND} or not _may_encode(context):
        return None
    asked = {"encoder_only": True, "encoder_window": max(WINDOWS) * (missing[0] == "windows"), "causal": False}
    return f"encoder-only layers ({missing[0]})", with_layers(context, sliding_window_size=-1, **asked)


def _may_encode(context: BackendContext) -> bool:
    layers = context.layers
    return all(each.head_layout.has_keys and not (each.head_layout.values_in_keys or each.topk) for each in layers)


def _undeclared_cache(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if not declared.encoder_only.only or not all(layer.encoder_only for layer in context.layers):
        return None
    return "layers with keys in a pool", with_layers(context, encoder_only=False, encoder_window=0)


def _wrong(case: Fields) -> str:
    if case.encoder not in ("none", *ENCODER_LAYERS):
        return f"encoder {case.encoder!r}: none or one of {ENCODER_LAYERS}"
    if case.encoder != "none" and (any(case.prefixes) or NON_CAUSAL.word not in case.variants):
        return f"{_WORDS[case.encoder]} needs noncausal and requests without keys before the step, such as k0"
    return ""


def _has_windows(case: Fields) -> list[bool]:
    """Flags of the layers: True for one with windows. The others see whole sequences, as in Qwen2.5-VL."""
    return [case.encoder == "windows" and place % PERIOD == 0 for place in range(case.layers.count)]


def _layers(case: Fields) -> Sequence[Changes]:
    if case.encoder == "none":
        return [{}] * case.layers.count
    return [{"encoder_only": True, "encoder_window": max(WINDOWS) * has} for has in _has_windows(case)]


def _steps(case: Fields, plans: list[Plan]) -> list[Plan]:
    if case.encoder == "none":
        return plans
    return [replace(plan, prefixes=(0,) * len(plan.prefixes)) for plan in plans]


def _phrase(case: Fields) -> str:
    having = ", ".join(case.layers.name(place) for place, has in enumerate(_has_windows(case)) if has)
    return _PHRASES[case.encoder].format(having, max(WINDOWS)) if case.encoder != "none" else ""


def _eager_only(declared: Capabilities, case: Fields) -> str:
    has = case.encoder != "none" and not declared.encoder_only.in_graphs
    return "not declared: encoder-only layers in graphs" if has else ""


def _option(name: str, kind: str) -> Covered:
    return option(name, lambda declared, mode: kind in kinds_of(declared, mode), lambda case: case.encoder == kind)


ENCODER_ONLY = Feature(
    name="encoder-only layers",
    order=337,
    fields=("encoder",),
    option=True,
    traits=(
        Trait(
            "encoder-only layers",
            lambda case: case.encoder != "none",
            excludes={
                "no prompts": "servers encode whole sequences",
                "heads with their own scaling": "an encoder stores no latent rows",
                "chunks": "a sequence is encoded at once",
                "chunked-local layers": "no model has both",
                "cross-attention layers": "they are layers of the decoder",
                "selected keys": "models with an indexer are causal",
                "additive bias": "no model has both",
                "multi-mode instance": "an encoder has no other mode",
                **dict.fromkeys(
                    (
                        "FP8 pool",
                        "packed rows",
                        "K and V in one allocation",
                        "KV groups",
                        "KV splits",
                        "layers that share KV",
                        "rows on ranks",
                        "bigpool",
                        "hybrid layers",
                    ),
                    _DOES_NOT_COMBINE,
                ),
            },
        ),
        Trait(
            "windows of encoders",
            lambda case: case.encoder == "windows",
            excludes={"sliding window": "no model has both"},
        ),
    ),
    wrong=_wrong,
    eager_only=_eager_only,
    words=(
        Word(
            "|".join(_WORDS.values()),
            lambda match, so_far: {"encoder": next(kind for kind, word in _WORDS.items() if word == match[0])},
            lambda case: _WORDS.get(case.encoder, ""),
            spelled=tuple(_WORDS.values()),
        ),
    ),
    explained=(
        Entry(
            "encoder",
            "Encoder-only layers: a row sees the rows of its sequence in both directions. No key is stored, and "
            "`forward` gets the keys and values of all rows.",
            also=("encoder-only layers", "ENCODER_ONLY", "attention without a cache", "vision encoder"),
            page="how-to/encoders.md",
        ),
        Entry(
            "encoderwindows",
            "Encoder-only layers. In every second layer a row sees only its window, a part of its sequence.",
            also=("cu_window_seqlens",),
            page="how-to/encoders.md",
        ),
    ),
    describe=lambda case: {"encoder-only layers": _phrase(case)},
    declared=(Asked(lambda case: f"layers of kind {case.encoder} of an encoder", _declared),),
    fit=_fit,
    values=Columns(_columns, _of_row, meets={"encoder": ("new_tokens", "window")}, further=("encoder",)),
    covered=(_option("encoder-only layers", "whole"), _option("windows of encoders", "windows")),
    simpler=of_fields(
        "encoder",
        value=lambda case: case.encoder,
        reset=lambda case, minimal: {
            "encoder": minimal.encoder,
            "variants": case.variants - {NON_CAUSAL.word}
            if case.encoder != minimal.encoder == "none" == case.non_causal_window
            else case.variants,
        },
    ),
    undeclared=(_undeclared, _undeclared_cache),
    varies="instance",
    apply=(OnLayers(_layers), OnSteps(_steps)),
)
