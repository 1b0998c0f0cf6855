"""The refusals of every fake."""

from __future__ import annotations

from attn_testkit.backends.vendor.provider import VendorMissing

from . import flash_attn, flash_attn_2, flash_mla, flashinfer_checks, vllm_caches
from .refusals import Refusals


def all_refusals() -> tuple[Refusals, ...]:
    """Entry points of all fakes whose compiled code refuses arguments; without FlashInfer none of its own."""
    try:
        of_flashinfer = flashinfer_checks.refusals()
    except VendorMissing:
        of_flashinfer = ()
    return flash_attn.REFUSALS + flash_attn_2.REFUSALS + flash_mla.REFUSALS + vllm_caches.REFUSALS + of_flashinfer
