"""Cross-attention layers: a row sees the keys that an encoder gave its request once, and none of the decoder's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...contract import BackendContext, Capabilities, ForwardMode
from ..fields import Changes, Fields
from ..layers import PERIOD
from ..plan import Plan
from .dimension import Asked, Bound, Dimension, OnLayers, OnSteps, Without, Word, of_number, option
from .outside import with_layers


def _slots(case: Fields) -> str:
    return "own_group" if case.layers.groups else "first"


def _declared(declared: Capabilities, case: Fields) -> bool:
    cross = declared.cross_attention
    return not case.encoder_len or (case.mode in cross.modes and _slots(case) in cross.encoder_slots)


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    # A backend without any is asked for many things already, and its contexts stay what they were.
    modes = declared.cross_attention.modes
    if context.modes <= modes or not modes:
        return None
    layers = with_layers(context, is_cross_attention=True, causal=False, sliding_window_size=-1, attention_chunk_size=0)
    return "cross-attention layers", replace(layers, max_encoder_len=context.page_size)


def _layers(case: Fields) -> Sequence[Changes]:
    """Every second layer is a cross-attention layer, those that ``Layers.groups`` puts into the other KV group."""
    if not case.encoder_len:
        return [{}] * case.layers.count
    crosses = [place % PERIOD == 1 for place in range(case.layers.count)]
    return [{"is_cross_attention": True, "causal": False} if cross else {} for cross in crosses]


def _steps(case: Fields, plans: list[Plan]) -> list[Plan]:
    """Give each request encoder keys, which come first of its keys. Those of the longest encoder are ``encoder_len``.

    No request of a graph is without any, as SGLang's runner has it (``is_encoder_lens_supported``).
    """
    if not case.encoder_len:
        return plans
    found = []
    for index, plan in enumerate(plans):
        in_graph = case.mode is not ForwardMode.EXTEND and index < len(plans) - 1
        lens = _encoder_lens(case, index, len(plan.prefixes), in_graph=in_graph)
        prefixes = tuple(own + more for own, more in zip(plan.prefixes, lens, strict=True))
        found.append(replace(plan, prefixes=prefixes, encoder_lens=lens))
    return found


def _encoder_lens(case: Fields, index: int, count: int, *, in_graph: bool) -> tuple[int, ...]:
    most = case.encoder_len
    if index == 0:
        lens = [(most, 1, most // 2 + 1, max(1, most - 1))[place % 4] for place in range(count)]
    else:
        rng = np.random.default_rng((case.digest + index) % 2**63)
        lens = [int(length) for length in rng.integers(1, most + 1, count)]
    if not in_graph and count > 2:
        lens[index % (count - 1) + 1] = 0
    # In a pool that all layers share the keys of the decoder begin a page.
    unit = 1 if case.layers.groups else case.page_size
    return tuple(-(-length // unit) * unit for length in lens)


CROSS_ATTENTION = Dimension(
    name="cross-attention layers",
    fields=("encoder_len",),
    words=(
        Word(
            r"cross(\d+)",
            lambda match, so_far: {"encoder_len": int(match[1])},
            lambda case: f"cross{case.encoder_len}" if case.encoder_len else "",
            bounds=(Bound("encoder keys", 1, 1 << 16),),
        ),
    ),
    describe=lambda case: {
        "cross-attention": f"every second layer, over up to {case.encoder_len} encoder keys per request"
        if case.encoder_len
        else ""
    },
    declared=(Asked(lambda case: f"cross-attention layers, encoder slots {_slots(case)}", _declared),),
    fit=Without("Cases are made of declared options."),
    values=Without("catalogue/cross_attention.py has cases of it."),
    combined=Without("Cases that are combined have windows and server variants."),
    covered=(
        option(
            "cross-attention layers",
            lambda declared, mode: mode in declared.cross_attention.modes,
            lambda case: case.encoder_len > 0,
            "catalogue/cross_attention.py has them.",
        ),
    ),
    simpler=of_number("encoder_len"),
    undeclared=(_undeclared,),
    random=lambda draws, declared, so_far: {},
    varies="layer",
    apply=(OnLayers(_layers), OnSteps(_steps)),
)
