"""Healthy controls of visibility."""

from __future__ import annotations

from .catalogue import control
from .e_non_causal import BlockBackend


@control("rows-that-see-later-rows")
class RowsThatSeeLaterRows(BlockBackend):
    """Draft blocks and encoder rows, which see all keys of their request (DFlash; ENCODER_ONLY layers)."""
