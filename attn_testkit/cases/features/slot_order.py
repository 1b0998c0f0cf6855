"""Order of a request's tokens in the KV pool."""

from __future__ import annotations

from .feature import Columns, Feature, Trait, Without, listed_word, no_capability, of_fields

LAYOUTS = ("contiguous", "shuffled", "interleaved", "reversed", "shared")
"""``reversed``: pages descend inside a request (non-monotonic slots). ``shared``: requests have the whole pages that
their prefixes have in common, as after a hit in a prefix cache."""

SLOT_ORDER = Feature(
    name="layout",
    order=120,
    fields=("layout",),
    traits=(Trait("shared prefixes", lambda case: case.layout == "shared"),),
    words=(listed_word(LAYOUTS, "layout"),),
    describe=lambda case: {"layout": case.layout},
    values=Columns(lambda declared, mode, tier: {"layout": list(LAYOUTS)}, inside={"layout": ("page_size",)}),
    simpler=of_fields("layout"),
    random=lambda draws, declared, so_far: {"layout": draws.one_of(LAYOUTS)},
    varies="step",
    apply=Without("steps/schedule.py gives requests their pages, and steps/variety.py each step another order."),
    **no_capability("Every backend takes every order of slots."),
)
