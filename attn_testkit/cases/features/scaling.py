"""The scaling of the logits: 1/sqrt(head_dim) in all layers, or a different factor in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...contract import BackendContext, Capabilities
from ...glossary import Entry
from ..fields import Changes, Fields
from ..layers import SETTINGS
from .feature import Asked, Feature, OnLayers, Trait, Without, flag_word, of_flag


def _other_scaling(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if declared.options.any_scaling or not context.layers[0].head_layout.usual_scaling:
        return None
    layers = tuple(replace(layer, scaling=layer.scaling / 2) for layer in context.layers)
    return "a scaling other than 1/sqrt(head_dim)", replace(context, layers=layers)


def _scalings(case: Fields) -> Sequence[Changes]:
    return [
        {"scaling": 1 / math.sqrt(shape.head_dim) * (1.0 if case.usual_scaling else own.factor)}
        for shape, own in zip(case.layer_shapes, SETTINGS, strict=False)
    ]


SCALING = Feature(
    name="usual scale",
    order=220,
    fields=("usual_scaling",),
    option=True,
    traits=(Trait("usual scaling", lambda case: case.usual_scaling),),
    words=(flag_word("usualscale", "usual_scaling"),),
    explained=(
        Entry(
            "usualscale",
            "All layers have the scaling 1/sqrt(head_dim). Without this word no layer has it, so a kernel "
            "that ignores the given scaling fails.",
            also=("usual scaling", "scaling", "softmax scale"),
        ),
    ),
    describe=lambda case: {"scaling": "1/sqrt(head_dim) in all layers" if case.usual_scaling else ""},
    declared=(
        Asked(
            lambda case: "a softmax scale that is not 1/sqrt(head_dim)",
            lambda declared, case: (
                declared.options.any_scaling or case.usual_scaling or not case.heads.layout.usual_scaling
            ),
        ),
    ),
    fit=lambda declared, case: {"usual_scaling": not declared.options.any_scaling and case.heads.layout.usual_scaling},
    values=Without("Only the nearest declared case has this value."),
    covered=Without("All cases of a backend have the same scaling."),
    simpler=of_flag("usual_scaling"),
    undeclared=(_other_scaling,),
    random=Without("Only the nearest declared case has this value."),
    varies="layer",
    apply=(OnLayers(_scalings),),
)
