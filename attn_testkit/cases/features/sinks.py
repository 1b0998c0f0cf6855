"""Attention sinks: one more logit for each query head, which gets weight but has no value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ...contract import BackendContext, Capabilities
from ...glossary import Entry
from ..fields import Changes, Fields
from ..layers import SETTINGS, SINKING, varies
from ..normals import normals
from .feature import (
    Asked,
    Columns,
    Feature,
    OnLayers,
    Trait,
    flag_word,
    of_flag,
    option,
)


def _undeclared_sinks(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if declared.options.sinks:
        return None
    layers = tuple(
        replace(layer, sinks=torch.zeros(layer.tp_q_head_num, device=context.device)) for layer in context.layers
    )
    return "attention sinks", replace(context, layers=layers)


def _sinks(case: Fields) -> Sequence[Changes]:
    """Host tensors, float32 values that bf16 has too: a checkpoint's sinks have the dtype of the model."""
    if not case.sinks:
        return [{}] * case.layers.count
    rng, found = np.random.default_rng(case.digest ^ 0x51), []
    for has, shape, own in zip(sinking(case), case.layer_shapes, SETTINGS, strict=False):
        sinks = normals((shape.num_qo_heads,), rng) * 1.5 + own.sink
        # Some heads of a long request must feel their sink too.
        sinks[::2] += math.log(1 + max(case.prefixes))
        found.append({"sinks": sinks.bfloat16().float()} if has else {})
    return found


def sinking(case: Fields) -> list[bool]:
    """Flags of the layers: True for a layer with sinks, in a case with sinks."""
    if not case.sinks or not case.layers.varied:
        return [True] * case.layers.count
    return [turn in SINKING for turn in case.layers.turns_from(case.derived("richest-layer"))]


def _phrase(case: Fields) -> str:
    if not case.sinks:
        return ""
    having = ", ".join(case.layers.name(place) for place, has in enumerate(sinking(case)) if has)
    return "one more logit for each query head" + (f", in {having or 'no layer'}" if case.layers.varied else "")


SINKS = Feature(
    name="sinks",
    order=240,
    fields=("sinks",),
    option=True,
    traits=(Trait("sinks", lambda case: case.sinks),),
    words=(flag_word("sink", "sinks"),),
    explained=(
        Entry(
            "sink",
            "A learned logit per query head that takes part in the softmax and has no value.",
            also=("sinks", "attention sink"),
        ),
    ),
    describe=lambda case: {"sinks": _phrase(case)},
    declared=(Asked(lambda case: "sinks", lambda declared, case: declared.options.sinks or not case.sinks),),
    values=Columns(
        lambda declared, mode, tier: {"sinks": [False, True] if declared.options.sinks else [False]},
        lambda declared, row, so_far: {"sinks": declared.options.sinks} if varies(row) else {},
        {"sinks": ()},
    ),
    covered=(option("sinks", lambda declared, mode: declared.options.sinks, lambda case: case.sinks),),
    simpler=of_flag("sinks"),
    undeclared=(_undeclared_sinks,),
    random=lambda draws, declared, so_far: {"sinks": draws.one_of([False, True])} if declared.options.sinks else {},
    varies="layer",
    apply=(OnLayers(_sinks),),
)
