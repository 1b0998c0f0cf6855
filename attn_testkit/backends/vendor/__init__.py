"""Access to the vendors' packages: the real entry point if it can run, else a torch fake of it."""

from .provider import (
    EntryPoint,
    Provided,
    VendorMismatch,
    VendorMissing,
    device_is_real,
    fake_of,
    forced,
    provide,
    real,
    sm_of,
    swapped,
    why_not_here,
)

__all__ = [
    "EntryPoint",
    "Provided",
    "VendorMismatch",
    "VendorMissing",
    "device_is_real",
    "fake_of",
    "forced",
    "provide",
    "real",
    "sm_of",
    "swapped",
    "why_not_here",
]
