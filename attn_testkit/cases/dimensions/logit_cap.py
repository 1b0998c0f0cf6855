"""The soft cap of a layer's logits."""

from __future__ import annotations

from collections.abc import Sequence

from ...contract import BackendContext, Capabilities
from ..fields import Changes, Fields
from ..layers import PERIOD
from .dimension import Asked, Bound, Columns, Dimension, Kept, OnLayers, Without, Word, of_number, option
from .outside import with_layers

__all__ = ["LOGIT_CAP"]

_CAPS = (0.0, 1.5)
"""None, and one of the size of the logits that the data give."""


def _undeclared_cap(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if declared.logit_cap:
        return None
    return "a soft cap", with_layers(context, logit_cap=2.0)


def _caps(case: Fields) -> Sequence[Changes]:
    caps = [0.0] * PERIOD
    if case.logit_cap:
        caps[case.derived("capped-layer")] = case.logit_cap
    return [{"logit_cap": caps[place % PERIOD]} for place in range(case.layers.count)]


LOGIT_CAP = Dimension(
    name="soft cap",
    fields=("logit_cap",),
    words=(
        Word(
            r"cap((\d+)(?:\.(\d+))?)",
            lambda match, so_far: {"logit_cap": float(match[1])},
            lambda case: f"cap{case.logit_cap:g}" if case.logit_cap else "",
            bounds=(Bound("soft cap", 0, 999_999, 2), Bound("fraction of the soft cap", 0, 999_999, 3)),
        ),
    ),
    describe=lambda case: {"logit_cap": f"{case.logit_cap:g}, in {case.layers.turns}" if case.logit_cap else ""},
    declared=(Asked(lambda case: "soft cap", lambda declared, case: declared.logit_cap or not case.logit_cap),),
    fit=Without("Cases are made of declared options."),
    values=Columns(
        lambda declared, mode, tier: {"logit_cap": list(_CAPS if declared.logit_cap else _CAPS[:1])},
        order={"logit_cap": 9},
    ),
    combined=Kept(("logit_cap",)),
    covered=(option("soft cap", lambda declared, mode: declared.logit_cap, lambda case: case.logit_cap > 0),),
    simpler=of_number("logit_cap"),
    undeclared=(_undeclared_cap,),
    random=lambda draws, declared, so_far: {"logit_cap": draws.one_of(_CAPS)} if declared.logit_cap else {},
    varies="layer",
    apply=(OnLayers(_caps),),
)
