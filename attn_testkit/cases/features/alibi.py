"""ALiBi: a bias of each logit that grows with the distance of row and key, with a slope per query head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...contract import BackendContext, Capabilities, ForwardMode
from ...glossary import Entry
from ..fields import Changes, Fields
from .feature import Asked, Columns, Feature, OnLayers, Trait, flag_word, of_flag, option

_RANKS = 2
"""Ranks of the test model: this one has the last heads, so no slope follows from a head's number on the rank."""


def _declared(declared: Capabilities, case: Fields) -> bool:
    return not case.alibi or case.mode in declared.options.alibi


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    return {"alibi": [False, True]} if mode in declared.options.alibi else {}


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if context.modes <= declared.options.alibi:
        return None
    layers = tuple(
        replace(layer, alibi_slopes=torch.ones(layer.tp_q_head_num, device=context.device), logit_cap=0.0, sinks=None)
        for layer in context.layers
    )
    return "ALiBi", replace(context, layers=layers)


def _slopes(case: Fields) -> Sequence[Changes]:
    """Host tensors, one slope a query head. Layers have different slopes, although layers of a real model do not: a
    kernel must not keep the slopes of one layer for the next.
    """
    if not case.alibi:
        return [{}] * case.layers.count
    found = []
    for place, shape in enumerate(case.layer_shapes):
        heads = shape.num_qo_heads * _RANKS
        of_model = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
        found.append({"alibi_slopes": (of_model[-shape.num_qo_heads :] * (1 + place)).float()})
    return found


ALIBI = Feature(
    name="ALiBi",
    order=190,
    fields=("alibi",),
    option=True,
    traits=(
        Trait(
            "ALiBi",
            lambda case: case.alibi,
            excludes={
                "cross-attention layers": "an encoder key has no position among the decoder's keys",
                "noncausal": "a bias of keys that follow a row differs between servers",
                "heads with their own scaling": "no model has both",
                "soft cap": "FlashInfer caps the sum of logit and bias, but vLLM adds the bias to the capped logit",
                "sinks": "kernels may shift the bias of a row by a constant, which changes the weight of a sink",
                "KV splits": "kernels may shift the bias of a row by a constant, which changes the log-sum-exp",
                "branching trees": "nodes of a tree have positions of their own",
                "data that count keys": "a more distant key has less weight",
                "loop": "the model of a greedy loop has no bias",
                "selected keys": "models with an indexer have rotary embeddings",
            },
        ),
    ),
    words=(flag_word("alibi", "alibi"),),
    explained=(
        Entry(
            "alibi",
            "Attention with linear biases: a logit has `slope * (key position - row position)` added, with a "
            "slope for each query head.",
            also=("ALiBi", "slopes"),
        ),
    ),
    describe=lambda case: {"ALiBi": "a slope for each query head" if case.alibi else ""},
    declared=(Asked(lambda case: "ALiBi", _declared),),
    values=Columns(_columns, meets={"alibi": ("prefixes", "new_tokens", "window")}, further=("alibi",)),
    covered=(
        option(
            "ALiBi",
            lambda declared, mode: mode in declared.options.alibi,
            lambda case: case.alibi,
        ),
    ),
    simpler=of_flag("alibi"),
    undeclared=(_undeclared,),
    varies="layer",
    apply=(OnLayers(_slopes),),
)
