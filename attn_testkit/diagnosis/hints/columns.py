"""Right numbers in the wrong columns of the output."""

from __future__ import annotations

from ..moved_columns import moved_columns
from .evidence import Evidence
from .hint import Level, hint


@hint(Level.CAUSE)
def columns_moved(e: Evidence) -> str:
    """Every column of the wrong heads holds what another one should, the same one in every row."""
    source = moved_columns(e.comparison)
    if source is None:
        return ""
    moved = [(column, of) for column, of in enumerate(source) if column != of]
    named = ", ".join(f"column {column} holds what column {of} should" for column, of in moved[:2])
    more = f" and so on, {len(moved)} of {len(source)}" if len(moved) > 2 else ""
    return (
        f"columns of a head's output are in the wrong places: {named}{more}. The right KV tokens are attended to: look "
        "at how a tile of V is loaded and how the output is stored (order of fragments, swizzle, strides)"
    )
