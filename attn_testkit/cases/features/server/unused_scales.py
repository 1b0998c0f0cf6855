"""Scales of K and V in a checkpoint, although the KV pool holds K and V unscaled."""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from .variant import ServerVariant

UNUSED_SCALES = "unusedscales"
_LENS = (9, 70, 1)
_CORE = (ForwardMode.DECODE, ForwardMode.EXTEND)


def _fits(declared: Capabilities, case: Fields) -> bool:
    return declared.server.takes_unused_scales and case.kv_dtype == "same"


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if small.mode in _CORE and declared.server.takes_unused_scales and "same" in declared.kv_pool.kv_dtypes:
        own = small.with_changes(kv_dtype="same", data="gauss", variants=frozenset({UNUSED_SCALES}))
        yield own.of_requests(_LENS, padded=1)


UNUSED_SCALES_VARIANT = ServerVariant(
    UNUSED_SCALES,
    "k_scale and v_scale of layers are not 1, and the KV pool holds K and V unscaled",
    "server.takes_unused_scales",
    _cases,
    _fits,
    excludes={
        "FP8 pool": "the scales of an FP8 pool are used",
        "states": "a layer that keeps a state has no KV pool",
        "loop": "the model of a loop has no scales",
    },
    order=130,
    also=("takes_unused_scales",),
)
