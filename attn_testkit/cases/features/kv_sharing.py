"""Layers without keys and values of their own: they read those of an earlier layer (Gemma 3n, YOCO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...contract import BackendContext, Capabilities
from ...glossary import Entry
from ..fields import Changes, Fields
from .feature import Asked, Columns, Feature, OnLayers, Trait, flag_word, of_flag, option


def reader_and_owner(case: Fields) -> tuple[int, int] | None:
    """Places of the layer that stores nothing, which is the last one, and of the first layer, whose keys and values it
    reads; None if all layers have their own."""
    return (case.layers.count - 1, 0) if case.kv_sharing else None


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    first, last = context.layers[0], context.layers[-1]
    alike = first.head_shape == last.head_shape and first.family == last.family == "softmax"
    if declared.kv_pool.kv_sharing or len(context.layers) < 2 or not alike or context.kv_groups:
        return None
    reader = replace(last, kv_sharing_target_layer_id=first.layer_id)
    return "a layer that reads the KV of another", replace(context, layers=(*context.layers[:-1], reader))


def _layers(case: Fields) -> Sequence[Changes]:
    found: list[Changes] = [{} for _ in range(case.layers.count)]
    if (places := reader_and_owner(case)) is not None:
        reader, owner = places
        found[reader] = {"kv_sharing_target_layer_id": case.layers.first + owner}
    return found


KV_SHARING = Feature(
    name="shared KV",
    order=285,
    fields=("kv_sharing",),
    option=True,
    traits=(
        Trait(
            "layers that share KV",
            lambda case: case.kv_sharing,
            excludes={
                "layers of one kind": "a single layer has no earlier one",
                "KV groups": "both layers are in one group, and a group of the case has one window",
                "heads by layer": "both layers have the same KV heads",
                "cross-attention layers": "the layers of an encoder-decoder model keep their own keys",
                "selected keys": "a layer that has no keys has no index keys",
                "states": "a layer that keeps a state has no keys",
                "FP8 pool": "both layers have the scales of the pool, and scales of the case differ by layer",
                "ranks with their own pools": "a rank's pool has the keys of each layer",
                "loop": "the stages of a loop store keys in all layers",
            },
        ),
    ),
    words=(flag_word("kvsharing", "kv_sharing"),),
    explained=(
        Entry(
            "kvsharing",
            "The last layer stores nothing and reads the keys and values of the first layer, as in Gemma 3n and YOCO.",
            also=("KV sharing", "kv_sharing_target_layer_name", "YOCO"),
            page="reference/layers.md",
        ),
    ),
    describe=lambda case: {"shared KV": "the last layer reads the KV of the first" if case.kv_sharing else ""},
    declared=(
        Asked(
            lambda case: "a layer that reads the KV of another",
            lambda declared, case: declared.kv_pool.kv_sharing or not case.kv_sharing,
        ),
    ),
    values=Columns(
        lambda declared, mode, tier: {"kv_sharing": [False, True]} if declared.kv_pool.kv_sharing else {},
        further=("kv_sharing",),
    ),
    covered=(option("shared KV", lambda declared, mode: declared.kv_pool.kv_sharing, lambda case: case.kv_sharing),),
    simpler=of_flag("kv_sharing"),
    undeclared=(_undeclared,),
    varies="instance",
    apply=(OnLayers(_layers),),
)
