"""Contents of the rows between live requests and the bucket; see ``steps/schedule.py``."""

from __future__ import annotations

from .feature import Columns, Feature, Without, no_capability, of_fields

PADDINGS = ("prod", "nan", "stale", "small")
"""``prod``: values that servers fill in. ``small``: small live requests. ``stale``: values of an earlier step."""

PADDING = Feature(
    name="padding",
    order=310,
    fields=("padding",),
    words=Without("It is written in the word of the bucket."),
    describe=Without("The phrase of the bucket names it if there is padding."),
    values=Columns(
        lambda declared, mode, tier: {"padding": list(PADDINGS)},
        lambda declared, row, so_far: {"padding": row["padding"] if row["slack"] else "prod"},
        {"padding": ()},
    ),
    simpler=of_fields("padding"),
    random=lambda draws, declared, so_far: {
        "padding": draws.one_of(PADDINGS) if so_far["bucket"] > len(so_far["prefixes"]) else "prod"
    },
    varies="step",
    apply=Without("steps/variety.py gives each step a padding, and runner_modes/ fill the rows."),
    **no_capability("Every backend has to accept every padding; the dialect defines padded requests."),
)
