"""The refusals of every fake."""

from __future__ import annotations

from . import flash_mla
from .refusals import Refusals


def all_refusals() -> tuple[Refusals, ...]:
    """Entry points of all fakes whose compiled code refuses arguments."""
    return flash_mla.REFUSALS
