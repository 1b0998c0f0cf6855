"""Extend: number of chunks in which the prompts of the case's own batch arrive."""

from __future__ import annotations

from ...contract import ForwardMode
from ...glossary import Entry
from ..rows import Extend, changed_rows
from .feature import Bound, Columns, Feature, Trait, Without, Word, no_capability, of_rows_part

CHUNKS = Feature(
    name="chunks",
    order=110,
    fields=Without("`rows` of an extend has it."),
    traits=(Trait("chunks", lambda case: case.chunks > 1),),
    words=(
        Word(
            r"chunks(\d+)",
            lambda match, so_far: changed_rows(so_far["rows"], chunks=int(match[1])),
            lambda case: f"chunks{case.chunks}" if case.chunks > 1 else "",
            bounds=(Bound("number of chunks", 2, 4096),),
        ),
    ),
    explained=(
        Entry(
            "chunks3",
            "extend: the prompts come in 3 chunks, of which the case's batch is the first.",
            also=("chunk", "chunks"),
            numbers=True,
        ),
    ),
    describe=lambda case: {
        "chunks": f"{case.chunks}: the case's own batch is the first, and the others follow it"
        if case.chunks > 1
        else ""
    },
    values=Columns(
        lambda declared, mode, tier: {"chunks": [1, 3]} if mode is ForwardMode.EXTEND else {},
        lambda declared, row, so_far: changed_rows(so_far["rows"], chunks=row["chunks"]) if "chunks" in row else {},
    ),
    simpler=of_rows_part(
        "chunks",
        steps=lambda declared, case, minimal: (changed_rows(case.rows, chunks=2) for _ in range(case.chunks > 2)),
    ),
    random=lambda draws, declared, so_far: (
        changed_rows(so_far["rows"], chunks=draws.number(1, 3)) if isinstance(so_far["rows"], Extend) else {}
    ),
    varies="step",
    apply=Without("cases/extend.py cuts a batch into chunks, and steps/schedule.py gives them the same slots."),
    **no_capability("For a backend a chunk is an ordinary extend."),
)
