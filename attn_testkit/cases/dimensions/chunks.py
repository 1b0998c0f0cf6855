"""Extend: steps in which the prompts of the own batch come."""

from __future__ import annotations

from ...contract import ForwardMode
from .dimension import Columns, Dimension, Without, Word, no_capability, of_number

__all__ = ["CHUNKS"]

CHUNKS = Dimension(
    name="chunks",
    fields=("chunks",),
    words=(
        Word(
            r"chunks(\d+)",
            lambda match: {"chunks": int(match[1])},
            lambda case: f"chunks{case.chunks}" if case.chunks > 1 else "",
        ),
    ),
    describe=lambda case: {
        "chunks": f"{case.chunks}: the own batch is the first, and the others follow it" if case.chunks > 1 else ""
    },
    values=Columns(lambda claims, mode, tier: {"chunks": [3, 1]} if mode is ForwardMode.EXTEND else {}),
    simpler=of_number("chunks", steps=lambda claims, case, plain: ({"chunks": 2} for _ in range(case.chunks > 2))),
    random=lambda draws, claims, so_far: {"chunks": draws.number(1, 3)} if so_far["mode"] is ForwardMode.EXTEND else {},
    varies="step",
    apply=Without("cases/extend.py cuts a batch into chunks, and cases/schedule.py gives them the same slots."),
    **no_capability("A chunk is an extend as any other to a backend."),
)
