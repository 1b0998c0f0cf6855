"""Server variants (``cases/features/server/``): conventions that some servers have and others do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...contract import BackendContext, Capabilities, ForwardMode
from ...glossary import Entry
from ..fields import Changes, Fields
from ..rows import Extend, Verify
from ..traits import excluded
from ..trees import chain
from .feature import (
    Asked,
    Columns,
    Draws,
    Feature,
    OnLayers,
    OnSteps,
    Row,
    Trait,
    Word,
    of_fields,
    option,
)
from .outside import with_layers
from .server.table import SERVER_VARIANTS, all_fit, variant_of


def _word(word: str) -> Word:
    return Word(
        word,
        lambda match, so_far: {"variants": so_far.get("variants", frozenset()) | {word}},
        lambda case: word * (word in case.variants),
        spelled=(word,),
    )


_MOST_RANDOM = 2
_IN_ARRAYS = tuple(word for word, each in SERVER_VARIANTS.items() if each.combines)


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    """Half of the draws have a variant, whatever else is drawn, so that it can be made simple by itself; settings that
    exclude it are reset. Non-causal layers have no window and no tree, and few random cases lack both.
    """
    drawn = Fields(**so_far)
    chained = drawn.with_changes(
        window=-1,
        layer_windows="any",
        rows=Verify(chain(len(drawn.rows.tree))) if isinstance(drawn.rows, Verify) else drawn.rows,
    )
    rows = replace(chained.rows, chunks=1) if isinstance(chained.rows, Extend) else chained.rows
    minimal = chained.with_changes(layout="contiguous", rows=rows)
    words = [word for word, variant in SERVER_VARIANTS.items() if variant.fits(declared, minimal)]
    chosen = frozenset(draws.one_of([""] * (len(words) or 1) + words) for _ in range(_MOST_RANDOM)) - {""}
    for case in (drawn, chained, chained.with_changes(kv_splits="", merged_by_backend=False)):
        found = case.with_changes(variants=chosen)
        if all_fit(declared, found) and not excluded(found):
            return {
                name: getattr(found, name) for name in ("kv_splits", "merged_by_backend", "window", "rows", "variants")
            }
    return {}


def _not_causal(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    asked = context.modes & {ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY}
    if asked <= declared.options.non_causal:
        return None
    return "a layer that is not causal", with_layers(context, causal=False, sliding_window_size=-1)


def _layers(case: Fields) -> Sequence[Changes]:
    return [{} if variant_of(case).causal else {"causal": False}] * case.layers.count


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    words = frozenset(word for word in _IN_ARRAYS if row.get(word))
    found: dict[str, Any] = {"variants": words}
    for word in sorted(words):
        found |= SERVER_VARIANTS[word].needs(declared, {**so_far, **found})
    return found


VARIANTS = Columns(
    lambda declared, mode, tier: {word: [False, True] for word in _IN_ARRAYS},
    _of_row,
    further=_IN_ARRAYS,
)

SERVER_VARIANT = Feature(
    name="variants",
    order=330,
    fields=("variants",),
    traits=(Trait("server variants", lambda case: bool(case.variants)),),
    words=tuple(map(_word, SERVER_VARIANTS)),
    explained=(
        Entry(
            "server variant",
            "Something that not every server does in the same way, such as empty batches. A case has it only "
            "if the backend declares it, or if every backend must take it.",
            also=("way", "ways", "dialect"),
        ),
    ),
    describe=lambda case: {
        "server variant": "; ".join(
            f"{word}: {variant.about}" for word, variant in SERVER_VARIANTS.items() if word in case.variants
        )
    },
    declared=(Asked(lambda case: f"the server variant {variant_of(case).word}", all_fit),),
    values=VARIANTS,
    covered=(
        option(
            "layers that are not causal",
            lambda declared, mode: mode in declared.options.non_causal,
            lambda case: not variant_of(case).causal,
            "cases/features/server/non_causal.py has them.",
        ),
    ),
    simpler=of_fields(
        "variants",
        value=lambda case: variant_of(case).word or "none",
        size=lambda case, minimal: (len(case.variants),),
        steps=lambda declared, case, minimal: (
            {"variants": case.variants - {word}} for word in sorted(case.variants) if len(case.variants) > 1
        ),
    ),
    undeclared=(_not_causal,),
    eager_only=lambda declared, case: variant_of(case).eager_only.get(case.mode, ""),
    random=_random,
    varies="instance",
    apply=(OnLayers(_layers), OnSteps(lambda case, plans: variant_of(case).plans(case, plans))),
)
