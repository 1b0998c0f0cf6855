"""Healthy controls of what backends say about windows."""

from __future__ import annotations

from .catalogue import control
from .f_claimed_windows import WINDOWED, ZeroIsNone


@control("window-of-zero-is-none")
class WindowOfZeroIsNone(ZeroIsNone):
    """A window of 0 counts as none, and it claims windows from 1 on (sglang)."""

    capabilities = WINDOWED.with_changes(min_window=1)
