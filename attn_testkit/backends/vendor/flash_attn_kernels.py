"""The entry point of FlashAttention 4, and the name of its fake.

``flash_attn.cute`` does not import without CuTe DSL, so the fake is bound to the signature in its source.
"""

from __future__ import annotations

from .provider import EntryPoint

VARLEN = EntryPoint(
    "flash_attn.cute.interface:flash_attn_varlen_func",
    ((90, 90),),
    "flash_attn_4_fake:varlen",
    "flash-attn-4",
    from_source=True,
)
