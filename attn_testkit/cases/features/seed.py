"""The seed: other data, slots, schedule and derived parameters for the same shapes."""

from __future__ import annotations

from ...glossary import Entry
from .feature import Bound, Feature, Without, Word, no_capability, of_number

SEED = Feature(
    name="seed",
    order=340,
    fields=("seed",),
    words=(
        Word(
            r"s(\d+)",
            lambda match, so_far: {"seed": int(match[1])},
            lambda case: f"s{case.seed}" if case.seed else "",
            bounds=(Bound("seed", 1, 10**18 - 1),),
        ),
    ),
    explained=(Entry("s1", "The seed of the case, if it is not 0.", numbers=True),),
    describe=lambda case: {"seed": str(case.seed or "")},
    values=Without("The caller of a tier sets it, for all cases."),
    simpler=of_number("seed"),
    random=lambda draws, declared, so_far: {"seed": draws.number(0, 99)},
    varies="instance",
    apply=Without("It is a word of the id, and everything random is a hash of the id."),
    **no_capability("A backend does not know it."),
)
