"""Contexts that ask for more than a backend declares, and the pools that belong to these contexts."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

import torch

from ...contract import AttentionLayer, BackendContext, KVPool


def first_undeclared(candidates: tuple[int, ...], declared: Set[int]) -> int | None:
    """The first number that is not declared; None: all numbers are declared."""
    return next((value for value in candidates if value not in declared), None)


def with_layers(context: BackendContext, **changes: Any) -> BackendContext:
    """Return the context with ``changes`` in all layers."""
    return replace(context, layers=tuple(replace(layer, **changes) for layer in context.layers))


def pool_like(
    context: BackendContext,
    size: int | None = None,
    page_size: int | None = None,
    layers: tuple[AttentionLayer, ...] | None = None,
    dtype: torch.dtype | None = None,
    layout: str | None = None,
) -> KVPool | None:
    """A pool like that of ``context``, with the given changes; None if the backend makes no such pool."""
    pool, page_size = context.kv_pool, page_size or context.page_size
    layout, layers, dtype = layout or pool.layout, layers or context.layers, dtype or pool.dtype
    form = pool.row_format if dtype == pool.dtype else ""
    try:
        return KVPool(size or page_size, page_size, layers, dtype, context.device, layout, pool.own, row_format=form)
    except Exception:
        return None
