"""The entry point of TokenSpeed's MLA kernel, and the name of its fake."""

from __future__ import annotations

from .provider import EntryPoint

DECODE = EntryPoint(
    # Not the package's own name for it: that one hides a failed import until the call.
    "tokenspeed_mla.mla_decode:tokenspeed_mla_decode",
    ((100, 100), (103, 103)),
    "tokenspeed_fake:make_decode",
    "tokenspeed",
)
MULTIPROCESSORS = 148
"""Multiprocessors of the emulated SM100 device."""
