"""The soft cap of a layer's logits."""

from __future__ import annotations

from collections.abc import Sequence

from ...contract import BackendContext, Capabilities
from ...glossary import Entry
from ..fields import Changes, Fields
from ..layers import CAPPED, PERIOD, varies
from .feature import Asked, Bound, Columns, Feature, OnLayers, Trait, Word, of_number, option
from .outside import with_layers

_CAPS = (0.0, 1.5)
"""No cap, and a cap in the range of the logits that the data give."""


def _undeclared_cap(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if declared.options.logit_cap:
        return None
    return "a soft cap", with_layers(context, logit_cap=2.0)


def _caps(case: Fields) -> Sequence[Changes]:
    return [{"logit_cap": case.logit_cap * has} for has in capped(case)]


def capped(case: Fields) -> list[bool]:
    """Flags of the layers: True for a layer with the soft cap of the case."""
    layers = range(case.layers.count)
    if not case.logit_cap or case.layers.count == 1:
        return [True for _ in layers]
    if case.layers.varied:
        return [turn in CAPPED for turn in case.layers.turns_from(case.derived("richest-layer"))]
    return [place % PERIOD == case.derived("capped-layer") for place in layers]


def _phrase(case: Fields) -> str:
    if not case.logit_cap:
        return ""
    layers = case.layers
    having = ", ".join(layers.name(place) for place, has in enumerate(capped(case)) if has)
    return f"{case.logit_cap:g}, in {having if layers.varied else layers.turns}"


LOGIT_CAP = Feature(
    name="soft cap",
    order=230,
    fields=("logit_cap",),
    option=True,
    traits=(Trait("soft cap", lambda case: case.logit_cap > 0),),
    words=(
        Word(
            r"cap((\d+)(?:\.(\d+))?)",
            lambda match, so_far: {"logit_cap": float(match[1])},
            lambda case: f"cap{case.logit_cap:g}" if case.logit_cap else "",
            bounds=(Bound("soft cap", 0, 999_999, 2), Bound("fraction of the soft cap", 0, 999_999, 3)),
        ),
    ),
    explained=(
        Entry(
            "cap1.5",
            "Logits of every second layer are bounded smoothly: cap * tanh(logit / cap).",
            also=("soft cap", "logit cap"),
            numbers=True,
        ),
    ),
    describe=lambda case: {"logit_cap": _phrase(case)},
    declared=(Asked(lambda case: "soft cap", lambda declared, case: declared.options.logit_cap or not case.logit_cap),),
    values=Columns(
        lambda declared, mode, tier: {"logit_cap": list(_CAPS if declared.options.logit_cap else _CAPS[:1])},
        lambda declared, row, so_far: {"logit_cap": _CAPS[declared.options.logit_cap]} if varies(row) else {},
        {"logit_cap": ()},
    ),
    covered=(option("soft cap", lambda declared, mode: declared.options.logit_cap, lambda case: case.logit_cap > 0),),
    simpler=of_number("logit_cap"),
    undeclared=(_undeclared_cap,),
    random=lambda draws, declared, so_far: {"logit_cap": draws.one_of(_CAPS)} if declared.options.logit_cap else {},
    varies="layer",
    apply=(OnLayers(_caps),),
)
