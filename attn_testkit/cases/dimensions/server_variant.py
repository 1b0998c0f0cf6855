"""What not every server does: one variant of ``cases/ways/``, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...contract import BackendContext, Capabilities, ForwardMode
from ..fields import Changes, Fields
from ..layers import Layers
from ..rows import Extend, Verify
from ..trees import chain
from ..ways import WAYS, way_of
from .dimension import (
    Asked,
    Dimension,
    Draws,
    OnLayers,
    OnSteps,
    Without,
    listed_word,
    of_fields,
    option,
)
from .outside import with_layers

__all__ = ["SERVER_VARIANT"]


def _declared(claims: Capabilities, case: Fields) -> bool:
    return not case.way or WAYS[case.way].needs_no_claim or WAYS[case.way].fits(claims, case)


def _random(draws: Draws, claims: Capabilities, so_far: Changes) -> Changes:
    """Half of the draws have one, whatever else is drawn, so that it can be made simple by itself; it takes the
    place of what no variant goes with. Layers that are not causal have no window and no tree, which few cases happen
    to be without.
    """
    layers = Layers(so_far["layers"].count, so_far["layers"].first)
    alone = Fields(**{**so_far, "layers": layers, "parts": "", "own_merge": False})
    chained = replace(alone, window=-1, rows=Verify(chain(len(alone.tree))) if alone.tree else alone.rows)
    rows = replace(chained.rows, chunks=1) if isinstance(chained.rows, Extend) else chained.rows
    minimal = replace(chained, layout="contiguous", rows=rows)
    words = [word for word, way in WAYS.items() if way.fits(claims, minimal)]
    word = draws.one_of([""] * (len(words) or 1) + words)
    found = next((case for case in (alone, chained) if word and WAYS[word].fits(claims, case)), None)
    if found is None:
        return {}
    return {name: getattr(found, name) for name in ("layers", "parts", "own_merge", "window", "rows")} | {"way": word}


def _not_causal(claims: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    asked = context.modes & {ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY}
    # Of three layers and more where nothing is declared: what a case of two has to choose from stays what it was.
    if asked <= claims.non_causal or (not claims.non_causal and len(context.layers) < 3):
        return None
    return "a layer that is not causal", with_layers(context, causal=False, sliding_window_size=-1)


def _layers(case: Fields) -> Sequence[Changes]:
    return [{"causal": way_of(case).causal}] * case.layers.count


SERVER_VARIANT = Dimension(
    name="way",
    fields=("way",),
    words=(listed_word(tuple(WAYS), "way", always=False),),
    describe=lambda case: {"way": f"{case.way}: {way_of(case).about}" if case.way else ""},
    declared=(Asked(lambda case: f"the way {case.way!r}", _declared),),
    fit=Without("Cases are made of variants that the backend takes."),
    values=Without("Each variant makes its cases, and cases/enriched.py combines them."),
    covered=(
        option(
            "layers that are not causal",
            lambda claims, mode: mode in claims.non_causal,
            lambda case: not way_of(case).causal,
            "cases/ways/non_causal.py has them.",
        ),
    ),
    simpler=of_fields("way"),
    undeclared=(_not_causal,),
    random=_random,
    varies="instance",
    apply=(OnLayers(_layers), OnSteps(lambda case, plans: way_of(case).plans(case, plans))),
)
