"""One step before it has slots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """One step before it has slots. See ``Step`` for the fields they share."""

    label: str
    bucket: int
    prefixes: tuple[int, ...]
    """Prefix tokens of each request."""
    eager_too: bool = False
    rotated: int | None = None
    """Lengths are those of the step before, rotated by so many places."""
    exact: bool = False
    """True for a step with as many requests as the bucket has."""
    new: tuple[int, ...] = ()
    """Extend: new tokens of each request. Empty elsewhere."""
    follows: bool = False
    """Extend: the next chunk of the step before it: the same requests, whose prefix is what they had and were given."""
    encoder_lens: tuple[int, ...] = ()
    """Encoder keys of each request, the first of its prefix. Empty without cross-attention layers."""
    layout: str = ""
    """Order of its slots. Empty: that of its turn (``steps/variety.py``), here and in ``padding`` and ``data``."""
    padding: str = ""
    data: str = ""
