"""Number of layers, their ids, KV groups and heads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...contract import BackendContext, Capabilities, ForwardMode, HeadShape, KVGroup
from ...glossary import Entry
from ..fields import Changes, Fields, Heads
from ..head_layouts import by_layer
from ..head_shapes import declared_shapes, read_shapes, wrong_with_shapes
from ..layers import LAYERS_WORD, PERIOD, SETTINGS, TURNS, Layers, varies
from .feature import (
    Asked,
    Bound,
    Columns,
    Draws,
    Feature,
    OnLayers,
    Row,
    Size,
    Trait,
    Word,
    of_fields,
    option,
)
from .logit_cap import capped
from .numbers import nearer_numbers
from .outside import pool_like
from .sinks import sinking
from .window import windows_of

_MOST_FIRST = 6
"""Id of the first layer of a random case."""


def fields_with_shapes(layers: Layers, shapes: tuple[HeadShape, HeadShape]) -> Changes:
    """Layers of two alternating shapes, with heads and a head dim that contain both."""
    most = max(shape.num_qo_heads for shape in shapes)
    ratio = min(shape.num_qo_heads // shape.num_kv_heads for shape in shapes)
    family = "mha" if ratio == 1 else "mqa" if most == ratio else "gqa"
    return {
        "heads": Heads(family, most, most // ratio),
        "head_dim": max(shape.head_dim for shape in shapes),
        "rope_dim": 0,
        "layers": replace(layers, shapes=shapes),
    }


def _read(match: re.Match[str], so_far: Changes) -> Changes:
    return {
        "layers": Layers(
            int(match[1]),
            int(match[2]),
            match[3] == "groups",
            read_shapes((match[5], match[6])),
            hybrid=match[3] == "hybrid",
            varied=bool(match[4]),
        )
    }


def _nearer(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    count, first = case.layers.count, case.layers.first
    if case.layers.varied:
        yield from _alone(case)
    alone = Layers(count, first)
    one_thing = (replace(alone, groups=case.layers.groups), replace(alone, shapes=case.layers.shapes))
    fewer = [replace(case.layers, count=near) for near in (PERIOD, *nearer_numbers(count, PERIOD))]
    for layers in (alone, *one_thing, replace(case.layers, first=0), *fewer):
        yield {"layers": layers}


def _alone(case: Fields) -> Iterator[Changes]:
    """Each layer by itself, with its id and its options."""
    options = zip(windows_of(case), capped(case), sinking(case), strict=True)
    for place, (window, has_cap, has_sinks) in enumerate(options):
        yield {
            "layers": Layers(1, case.layers.first + place),
            "window": window,
            "layer_windows": case.layer_windows if window >= 0 else "any",
            "logit_cap": case.logit_cap * has_cap,
            "sinks": case.sinks and has_sinks,
        }


def _size(case: Fields, minimal: Fields) -> Size:
    layers = case.layers
    return (bool(layers.shapes) + layers.groups + layers.varied, abs(layers.count - minimal.layers.count), layers.first)


def _kinds(case: Fields) -> str:
    return "softmax layers between layers that keep a state" if case.layers.hybrid else "states without softmax layers"


def _second_group(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if declared.kv_pool.kv_groups or len(context.layers) < PERIOD:
        return None
    first, *rest = context.layers
    groups = tuple(
        KVGroup(index, tuple(layer.layer_id for layer in layers), context.kv_pool, context.req_to_token)
        for index, layers in enumerate(((first,), rest))
    )
    return "a second KV group", replace(context, kv_groups=groups)


def _other_heads(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    # Another layer has heads that are declared by themselves.
    first = context.layers[0]
    if (
        declared.heads.heads_by_layer
        or len(context.layers) < PERIOD
        or not first.head_layout.by_layer
        or len(context.head_shapes) > 1
    ):
        return None
    other = next((dim for dim in sorted(declared.heads.head_dims) if dim != first.head_dim), None)
    changed: dict[str, Any] = {"head_dim": other, "v_head_dim": other} if other else {
        "tp_q_head_num": 2 * first.tp_q_head_num, "tp_k_head_num": 2 * first.tp_k_head_num,
    }  # fmt: skip
    if not other and first.q_per_kv > 1 and first.tp_k_head_num == 1:
        return None
    layers = (*context.layers[:-1], replace(context.layers[-1], sinks=None, **changed))
    pool = pool_like(context, layers=layers)
    if pool is None:
        return None
    return "a layer whose heads differ from the first layer's", replace(context, layers=layers, kv_pool=pool)


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    """Columns for options in every second layer, or another combination of options in each layer (the array of core
    does not pair options); for ids of a later pipeline rank; and for two KV groups."""
    found: dict[str, Sequence[Any]] = {"first_layer": [0, 5]}
    windows = mode in declared.windows.modes and declared.windows.layers != "same"
    if tier != "smoke" and (windows or declared.options.logit_cap or declared.options.sinks):
        found["varied"] = [False, True]
    return found | ({"kv_groups": [False, True]} if declared.kv_pool.kv_groups else {})


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    encoder, first, varied = row.get("encoder_slots"), row.get("first_layer", 0), varies(row)
    groups = row.get("kv_groups", False) or encoder == "own_group"
    if groups and encoder == "first":
        raise ValueError("encoder keys have a group of their own")
    return {"layers": Layers(3 if varied else PERIOD, first, groups, varied=varied)}


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    """The simplest are two layers from 0, in one KV group."""
    counts = sorted(range(1, TURNS + 1), key=lambda count: abs(count - Layers().count))
    count, first = draws.one_of(counts), draws.number(0, _MOST_FIRST)
    groups = declared.kv_pool.kv_groups and not so_far["rows"].mode.is_draft_decode() and draws.one_of([False, True])
    layers = Layers(count, first, groups and count >= PERIOD)
    pairs = declared_shapes(declared) if declared.heads.heads_by_layer and by_layer(declared) else []
    # Drawn whatever else is: what needs fewer draws would be taken for simpler. Parts are not drawn with them.
    shapes = draws.one_of([*[None] * (2 * len(pairs) or 1), *pairs])
    return fields_with_shapes(layers, shapes) if shapes and count >= PERIOD else {"layers": layers}


def _wrong(case: Fields) -> str:
    wrong = wrong_with_shapes(case.head_shape, case.layers.shapes) if case.layers.shapes else ""
    return f"{case.layers} in a case of {case.heads} and head dim {case.head_dim}: {wrong}" if wrong else ""


LAYERS = Feature(
    name="layers",
    order=280,
    fields=("layers",),
    traits=(
        Trait("one KV group", lambda case: not case.layers.groups),
        Trait(
            "KV groups",
            lambda case: case.layers.groups,
            excludes={
                "draft-decode": "all layers of a draft share one KV group",
            },
        ),
        Trait("heads by layer", lambda case: bool(case.layers.shapes)),
        Trait(
            "hybrid layers",
            lambda case: case.layers.hybrid,
            excludes={
                "no states": "the other layers of a hybrid model keep a state",
            },
        ),
        Trait("layers of one kind", lambda case: case.layers.count < PERIOD),
    ),
    wrong=_wrong,
    words=(
        Word(
            LAYERS_WORD,
            _read,
            lambda case: "" if case.layers == Layers() else str(case.layers),
            bounds=(
                Bound("number of layers", 1, len(SETTINGS)),
                Bound("id of the first layer", 0, 1 << 20, 2),
                *(Bound("heads and head dim of a layer", 1, 4096, group, 3, between="[xd]") for group in (5, 6)),
            ),
        ),
    ),
    explained=(
        Entry(
            "layers3from5",
            "Three attention layers with the ids 5, 6 and 7, as on a later pipeline rank. Without this word "
            "there are two, 0 and 1.",
            also=("layers", "layer ids"),
            numbers=True,
        ),
        Entry(
            "layers3from0varied",
            "Three attention layers, each with its own combination of window, soft cap and sinks.",
            also=("varied layers",),
            numbers=True,
        ),
        Entry(
            "layers3from5groups",
            "Layers in two KV groups: each has its own pool, request table and slots of new tokens.",
            also=("KV group", "KV groups", "hybrid KV cache"),
            numbers=True,
        ),
        Entry(
            "layers3from5hybrid",
            "Layers that keep a state and softmax layers, in turn, in one model.",
            also=("hybrid model", "hybrid wrapper"),
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "layers3from5by8x2d32.8x1d64",
            "Layers with different heads, alternating: 8 query and 2 KV heads of 32, then 8 and 1 of 64.",
            also=("heads by layer",),
            numbers=True,
        ),
    ),
    describe=lambda case: {"layers": "" if case.layers == Layers() else case.layers.words},
    declared=(
        Asked(lambda case: "KV groups", lambda declared, case: declared.kv_pool.kv_groups or not case.layers.groups),
        Asked(_kinds, lambda declared, case: case.layers.hybrid == bool(declared.state and declared.state.hybrid)),
        Asked(
            lambda case: "heads by layer",
            lambda declared, case: declared.heads.heads_by_layer or not case.layers.shapes,
        ),
    ),
    values=Columns(_columns, _of_row, further=("first_layer", "kv_groups", "varied")),
    covered=(
        option(
            "KV groups",
            lambda declared, mode: declared.kv_pool.kv_groups and not mode.is_draft_decode(),
            lambda case: case.layers.groups,
            "catalogue/layer_cases.py has them.",
        ),
        option(
            "heads by layer",
            lambda declared, mode: declared.heads.heads_by_layer and bool(by_layer(declared)),
            lambda case: bool(case.layers.shapes),
            "catalogue/layer_cases.py has them.",
        ),
    ),
    simpler=of_fields("layers", size=_size, steps=_nearer, value=lambda case: str(case.layers)),
    undeclared=(_second_group, _other_heads),
    random=_random,
    varies="instance",
    apply=(OnLayers(lambda case: [{"layer_id": case.layers.first + place} for place in range(case.layers.count)]),),
)
