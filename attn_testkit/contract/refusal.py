"""Refusals of declared records, and the conditions that several of them have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import torch

from .context import BackendContext
from .modes import ForwardMode

__all__ = ["Refusal", "first_outside", "kv_dtype_of", "modes_outside", "name_of_dtype"]

Refusal = tuple[str, object]
"""Name and value of a property of a context that is not declared."""
_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def first_outside(what: str, values: Iterable[object], supported: Set[object]) -> Iterator[Refusal]:
    """The first of ``values`` that is not supported."""
    for value in values:
        if value not in supported:
            yield what, value
            return


def modes_outside(
    what: str, context: BackendContext, supported: Set[ForwardMode], asked: object = True
) -> Iterator[Refusal]:
    """Modes of a context that are not supported, if ``asked`` is true."""
    if asked and not context.modes <= supported:
        yield what, ", ".join(sorted(context.modes - supported))


def name_of_dtype(dtype: torch.dtype) -> str:
    """A dtype as ``Precision.dtypes`` spells it."""
    return _DTYPE_NAMES.get(dtype, str(dtype))


def kv_dtype_of(context: BackendContext) -> str:
    """The dtype of the KV pool as ``KVPools.kv_dtypes`` spells it."""
    pool = context.kv_pool
    if pool.dtype == context.dtype:
        return "same"
    return "fp8_e4m3" if pool.dtype == torch.float8_e4m3fn else pool.row_format or str(pool.dtype)
