"""One step before it has slots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """One step before it has slots. See ``Step`` for the fields that both have."""

    label: str
    bucket: int
    prefixes: tuple[int, ...]
    """Prefix tokens of each request."""
    eager_too: bool = False
    rotated: int | None = None
    """Lengths are those of the step before, rotated by this number of places."""
    exact: bool = False
    """True for a step that fills its bucket with live requests."""
    new: tuple[int, ...] = ()
    """Extend: new tokens of each request. Empty elsewhere."""
    follows: bool = False
    """Extend: True for the next chunk of the step before it. It has the same requests, and their prefix includes the
    tokens of the step before."""
    encoder_lens: tuple[int, ...] = ()
    """Encoder keys of each request, the first of its prefix. Empty without cross-attention layers."""
    layout: str = ""
    """Order of its slots. Empty: the order of its turn (``steps/variety.py``); the same holds for ``padding`` and
    ``data``."""
    padding: str = ""
    data: str = ""
