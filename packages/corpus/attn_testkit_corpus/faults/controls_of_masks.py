"""Healthy controls of visibility."""

from __future__ import annotations

from .b_padded_tokens import MoreRowsOfBlocks
from .catalogue import control
from .e_non_causal import BlockBackend
from .e_non_causal_windows import WindowedBlockBackend


@control()
class RowsThatSeeLaterRows(BlockBackend):
    """Draft blocks and encoder rows, which see all keys of their request (DFlash; ENCODER_ONLY layers)."""


@control()
class PaddedRowsOfBlocks(MoreRowsOfBlocks):
    """Draft blocks whose rows are padded once they are planned, to a size that was compiled or captured (sglang)."""


@control()
class WindowsThatDoNotEndAtTheRow(WindowedBlockBackend):
    """Windows of layers that are not causal: of the row, of its block, or of both sides (DFlash, ModernBERT)."""
