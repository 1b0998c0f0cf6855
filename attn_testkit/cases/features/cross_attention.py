"""Cross-attention layers: a row sees the keys that an encoder stored once for its request, and no key of the
decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...contract import BackendContext, Capabilities, ForwardMode
from ...glossary import Entry
from ..fields import Changes, Fields
from ..layers import PERIOD
from ..plan import Plan
from .feature import Asked, Bound, Columns, Feature, OnLayers, OnSteps, Trait, Word, of_number, option
from .outside import with_layers


def _slots(case: Fields) -> str:
    return "own_group" if case.layers.groups else "first"


def _declared(declared: Capabilities, case: Fields) -> bool:
    cross = declared.cross_attention
    return not case.encoder_len or (case.mode in cross.modes and _slots(case) in cross.encoder_slots)


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    modes = declared.cross_attention.modes
    if context.modes <= modes:
        return None
    layers = with_layers(context, is_cross_attention=True, causal=False, sliding_window_size=-1, attention_chunk_size=0)
    return "cross-attention layers", replace(layers, max_encoder_len=context.page_size)


def _layers(case: Fields) -> Sequence[Changes]:
    """Every second layer is a cross-attention layer: the layers that ``Layers.groups`` puts into the other KV group."""
    if not case.encoder_len:
        return [{}] * case.layers.count
    crosses = [place % PERIOD == 1 for place in range(case.layers.count)]
    return [{"is_cross_attention": True, "causal": False} if cross else {} for cross in crosses]


def _steps(case: Fields, plans: list[Plan]) -> list[Plan]:
    """Give each request encoder keys, which come before its other keys. The longest encoder has ``encoder_len`` of
    them. Each request of a graph has some, as in SGLang's runner (``is_encoder_lens_supported``).
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


def _context(schedules: Sequence[Any]) -> Changes:
    return {"max_encoder_len": max(each.max_encoder_len for each in schedules)}


def _eager_only(declared: Capabilities, case: Fields) -> str:
    # ``prefill_cuda_graph_runner`` of SGLang refuses an encoder.
    prompts = case.encoder_len > 0 and case.mode is ForwardMode.EXTEND
    return "SGLang captures prefills without an encoder, and vLLM runs them eagerly" if prompts else ""


CROSS_ATTENTION = Feature(
    name="cross-attention layers",
    order=180,
    fields=("encoder_len",),
    option=True,
    traits=(
        Trait(
            "cross-attention layers",
            lambda case: case.encoder_len > 0,
            excludes={
                "layers of one kind": "the decoder also has self-attention layers",
                "sliding window": "SGLang's backends refuse them together, and no model has both",
                "chunked-local layers": "no model has both",
                "requests without rows": "a request with an encoder begins with a row",
                "sinks": "no model has both",
                "selected keys": "an index is a position among the keys of the decoder",
                "KV splits": "KV splits divide the keys that all layers see",
                "packed rows": "no model has both",
                "heads with their own scaling": "no model has both",
                "heads by layer": "no model has both",
                "multi-mode instance": "target-verify and drafts have no encoder",
                "loop": "the model of a loop has no encoder",
                "chunks": "encoder keys belong to requests that begin",
                "shared prefixes": "requests share no encoder",
                "server variants": "conventions of servers are tried in models without an encoder",
            },
        ),
    ),
    context=_context,
    eager_only=_eager_only,
    words=(
        Word(
            r"cross(\d+)",
            lambda match, so_far: {"encoder_len": int(match[1])},
            lambda case: f"cross{case.encoder_len}" if case.encoder_len else "",
            bounds=(Bound("encoder keys", 1, 1 << 16),),
        ),
    ),
    explained=(
        Entry(
            "cross24",
            "Cross-attention layers: in every second layer a row sees all keys of its request's encoder, up "
            "to 24, and none of the decoder's.",
            also=("cross-attention layers", "encoder_lens", "encoder-decoder", "cross attention"),
            page="how-to/cross-attention.md",
            numbers=True,
        ),
    ),
    describe=lambda case: {
        "cross-attention": f"every second layer, over up to {case.encoder_len} encoder keys per request"
        if case.encoder_len
        else ""
    },
    declared=(Asked(lambda case: f"cross-attention layers, encoder slots {_slots(case)}", _declared),),
    values=Columns(
        lambda declared, mode, tier: (
            {"encoder_slots": ["", *sorted(declared.cross_attention.encoder_slots)]}
            if mode in declared.cross_attention.modes
            else {}
        ),
        lambda declared, row, so_far: {"encoder_len": 2 * so_far["page_size"] + 5} if row.get("encoder_slots") else {},
        meets={"encoder_slots": ("prefixes", "new_tokens")},
        further=("encoder_slots",),
    ),
    covered=(
        option(
            "cross-attention layers",
            lambda declared, mode: mode in declared.cross_attention.modes,
            lambda case: case.encoder_len > 0,
        ),
    ),
    simpler=of_number("encoder_len"),
    undeclared=(_undeclared,),
    varies="layer",
    apply=(OnLayers(_layers), OnSteps(_steps)),
)
