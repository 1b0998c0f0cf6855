"""ALiBi: a bias of each logit that grows with the distance of row and key, with a slope per query head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...contract import BackendContext, Capabilities
from ..fields import Changes, Fields
from .dimension import Asked, Dimension, OnLayers, Without, flag_word, of_flag, option

_RANKS = 2
"""Ranks of the test model: this one has the last heads, so no slope follows from a head's number on the rank."""


def _declared(declared: Capabilities, case: Fields) -> bool:
    return not case.alibi or case.mode in declared.alibi


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    # A backend without any is asked for many things already, and its contexts stay what they were.
    if context.modes <= declared.alibi or not declared.alibi:
        return None
    layers = tuple(
        replace(layer, alibi_slopes=torch.ones(layer.tp_q_head_num, device=context.device), logit_cap=0.0, sinks=None)
        for layer in context.layers
    )
    return "ALiBi", replace(context, layers=layers)


def _slopes(case: Fields) -> Sequence[Changes]:
    """Host tensors, one slope a query head. Layers differ, although those of a model do not: a kernel may not keep
    one layer's for the next.
    """
    if not case.alibi:
        return [{}] * case.layers.count
    found = []
    for place, shape in enumerate(case.layer_shapes):
        heads = shape.num_qo_heads * _RANKS
        of_model = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
        found.append({"alibi_slopes": (of_model[-shape.num_qo_heads :] * (1 + place)).float()})
    return found


ALIBI = Dimension(
    name="ALiBi",
    fields=("alibi",),
    words=(flag_word("alibi", "alibi"),),
    describe=lambda case: {"ALiBi": "a slope for each query head" if case.alibi else ""},
    declared=(Asked(lambda case: "ALiBi", _declared),),
    fit=Without("Cases are made of declared options."),
    values=Without("catalogue/alibi.py has cases of it."),
    combined=Without("Cases that are combined have soft caps and sinks."),
    covered=(
        option(
            "ALiBi",
            lambda declared, mode: mode in declared.alibi,
            lambda case: case.alibi,
            "catalogue/alibi.py has cases of it.",
        ),
    ),
    simpler=of_flag("alibi"),
    undeclared=(_undeclared,),
    random=lambda draws, declared, so_far: {},
    varies="layer",
    apply=(OnLayers(_slopes),),
)
