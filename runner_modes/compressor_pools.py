"""The memory of an instance whose layers compress keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attn_testkit.contract import BackendContext, CompressorContext, CompressorLayer, CompressorPool
from attn_testkit.families.compressor.data import compression_of, rope_table
from attn_testkit.steps.schedule import Schedule

from .pool_address import allocate_for


def with_compressor(context: BackendContext, schedules: Sequence[Schedule]) -> BackendContext:
    """The context with states, compressed rows and rotations, if its layers compress keys."""
    layers = tuple(layer for layer in context.layers if isinstance(layer, CompressorLayer))
    if not layers:
        return context
    make = allocate_for(schedules[0].case, 2 * len(layers))
    form = compression_of(schedules[0].case).rows
    pool = CompressorPool(
        context.kv_pool.num_slots, layers, context.dtype, context.device, context.page_size, form, make
    )
    positions = max(each.max_context_len + each.case.width for each in schedules)
    rope = rope_table(positions).to(context.device)
    return replace(context, compressor=CompressorContext(layers, pool, rope))
