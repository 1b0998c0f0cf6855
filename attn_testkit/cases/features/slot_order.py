"""Order of a request's tokens in the KV pool."""

from __future__ import annotations

from ...glossary import Entry
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
    explained=(
        Entry(
            "slot order",
            "The order of a request's tokens in the slots of the KV pool, such as `shuffled`.",
            also=("layout",),
        ),
        Entry("contiguous", "The pages of a request follow each other in the KV pool."),
        Entry("shuffled", "The pages of all requests are in random places of the KV pool."),
        Entry("interleaved", "The pages of different requests alternate in the KV pool."),
        Entry("reversed", "The pages of a request descend in the KV pool."),
        Entry("shared", "Requests share the whole pages of a common prefix, as with a prefix cache."),
    ),
    describe=lambda case: {"layout": case.layout},
    values=Columns(lambda declared, mode, tier: {"layout": list(LAYOUTS)}, inside={"layout": ("page_size",)}),
    simpler=of_fields("layout"),
    random=lambda draws, declared, so_far: {"layout": draws.one_of(LAYOUTS)},
    varies="step",
    apply=Without("steps/schedule.py gives requests their pages, and steps/variety.py gives each step another order."),
    **no_capability("Every backend has to support every order of slots."),
)
