"""The width of a head; in MLA the widths of the latent row and of the rope part after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...contract import BackendContext, Capabilities, ForwardMode
from ...contract.kv_layouts import OWN
from ...contract.row_format import ROW_FORMATS
from ...glossary import Entry
from ..fields import Changes, Fields
from ..head_layouts import latent, per_head
from .feature import Asked, Bound, Columns, Covered, Draws, Feature, OnLayers, Row, Trait, Word, of_number
from .heads import of_mla, of_others
from .numbers import smaller_declared, some_of
from .outside import first_undeclared, pool_like, with_layers

_WIDEST, _WIDEST_OF_OTHERS = 512, 256
"""Head dims that are wide; rows wider than the second number occur only in MLA."""
_MOST_WIDER = 2
"""Numbers of further columns of keys that a covering array has."""
_APART = {"nhd", OWN}
"""KV layouts in which K and V may have different widths."""


def _has_two_widths(declared: Capabilities) -> bool:
    """True if a pool may have K and V of two widths; rows of a KV format have a single width."""
    return all(
        (per_head(declared), declared.kv_pool.kv_layouts & _APART, declared.kv_pool.kv_dtypes - ROW_FORMATS.keys())
    )


def _dims(declared: Capabilities, *, of_mla: bool) -> list[int]:
    """Head dims of the array, ascending."""
    dims = sorted(dim for dim in declared.heads.head_dims if dim <= _WIDEST)
    return dims if of_mla else [dim for dim in dims if dim <= _WIDEST_OF_OTHERS] or dims


def dims_of_array(declared: Capabilities, tier: str) -> list[int]:
    """Head dims that the covering array of a tier has. MLA next to other heads also has the widest."""
    return some_of(_dims(declared, of_mla=not per_head(declared)), 2 if tier == "smoke" else 3)


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[int]]:
    found = {"head_dim": dims_of_array(declared, tier)}
    return {**found, "rope_dim": sorted(declared.heads.mla_rope_dims)} if latent(declared) else found


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    if not so_far["heads"].layout.values_in_keys:
        return {"rope_dim": 0}
    found = {"rope_dim": row["rope_dim"]}
    if per_head(declared) and row["head_dim"] in _dims(declared, of_mla=False)[-1:]:
        # The widest of the column is that of other heads; DeepSeek's latent rows are wider.
        found["head_dim"] = _dims(declared, of_mla=True)[-1]
    return found


def _wider_of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    if not row.get("wider_keys"):
        return {}
    if so_far["heads"].layout.values_in_keys:
        raise ValueError("keys of MLA are as wide as its rope part makes them")
    return {"rope_dim": row["wider_keys"]}


WIDER_KEYS = Columns(
    lambda declared, mode, tier: (
        {"wider_keys": [0, *some_of(declared.heads.wider_keys, _MOST_WIDER)]}
        if declared.heads.wider_keys and _has_two_widths(declared)
        else {}
    ),
    _wider_of_row,
    further=("wider_keys",),
)
"""Columns of keys after those of values, outside of MLA."""


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    # As in the catalogue: wider rows are those of MLA.
    widest = max(_WIDEST, min(declared.heads.head_dims))
    dim = draws.one_of([dim for dim in sorted(declared.heads.head_dims) if dim <= widest])
    has_rope = so_far["heads"].layout.values_in_keys
    return {"head_dim": dim, "rope_dim": draws.one_of(sorted(declared.heads.mla_rope_dims)) if has_rope else 0}


def _wider(case: Fields) -> int:
    """Columns that a key has more than a value, outside MLA."""
    return 0 if case.heads.layout.values_in_keys else case.rope_dim


def _undeclared_wider(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    more = first_undeclared((16, 32, 48), declared.heads.wider_keys)
    # Layers that keep a state have a width of keys of their own.
    if more is None or context.state is not None or any(layer.head_layout.values_in_keys for layer in context.layers):
        return None
    layers = tuple(replace(layer, head_dim=layer.v_head_dim + more) for layer in context.layers)
    pool = pool_like(context, layers=layers)
    return (f"keys wider than values by {more}", replace(context, layers=layers, kv_pool=pool)) if pool else None


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    dim = first_undeclared((48, 80, 24), declared.heads.head_dims)
    if dim is None or context.layers[0].head_layout.values_in_keys:
        return None
    other = with_layers(context, head_dim=dim, v_head_dim=dim)
    pool = pool_like(other)
    return (f"head dim {dim}", replace(other, kv_pool=pool)) if pool else None


def _layers(case: Fields) -> Sequence[Mapping[str, Any]]:
    rank = case.head_dim if case.heads.layout.values_in_keys else 0
    widths = [shape.head_dim for shape in case.layer_shapes]
    return [{"head_dim": row, "v_head_dim": row - case.rope_dim, "kv_lora_rank": rank} for row in widths]


HEAD_DIM = Feature(
    name="head dim",
    order=40,
    fields=("head_dim", "rope_dim"),
    traits=(
        Trait(
            "keys wider than values",
            lambda case: case.rope_dim > 0 and not case.heads.layout.values_in_keys,
            excludes={
                "K and V in one allocation": "in such a pool K and V have the same width",
                "heads by layer": "the heads of all layers are in one tensor of values and keys",
                "loop": "the model of a loop has the same width for K and V",
                "packed rows": "a row format has the same width for K and V",
            },
        ),
    ),
    words=(
        Word(
            r"d(\d+)(?:r(\d+))?",
            lambda match, so_far: {"head_dim": int(match[1]), "rope_dim": int(match[2] or 0)},
            lambda case: f"d{case.head_dim}" + (f"r{case.rope_dim}" if case.rope_dim else ""),
            always=True,
            bounds=(Bound("head dim", 1, 4096), Bound("rope width", 1, 4096, 2)),
        ),
    ),
    explained=(
        Entry(
            "d128",
            "Width of a head of q, k and v.",
            also=("head dim", "head size"),
            numbers=True,
        ),
        Entry(
            "d512r64",
            "MLA: the width of the latent part of a key, then that of the rope part, which is not in the "
            "value. Other heads: the width of values, then the columns by which keys are wider "
            "(`wider_keys`).",
            also=("latent width", "rope width"),
            numbers=True,
        ),
    ),
    describe=lambda case: {
        "head_dim": f"{case.head_dim}, and {case.head_dim + case.rope_dim} of keys"
        if _wider(case)
        else str(case.head_dim),
        "rope_dim": "" if _wider(case) else str(case.rope_dim or ""),
    },
    declared=(
        Asked(
            lambda case: f"head dim {case.head_dim}",
            lambda declared, case: all(
                dim in declared.heads.head_dims
                for dim in ([shape.head_dim for shape in case.layers.shapes] or [case.head_dim])
            ),
        ),
        Asked(
            lambda case: f"MLA rope width {case.rope_dim}",
            lambda declared, case: (
                bool(_wider(case))
                or (case.rope_dim in (declared.heads.mla_rope_dims if case.heads.layout.values_in_keys else {0}))
            ),
        ),
        Asked(
            lambda case: f"keys wider than values by {_wider(case)}",
            lambda declared, case: _wider(case) in declared.heads.wider_keys | {0},
        ),
    ),
    values=Columns(_columns, _of_row),
    covered=(
        Covered(
            "head_dim",
            "head dim",
            lambda declared, mode: declared.heads.head_dims if per_head(declared) else (),
            lambda declared, case: None if case.heads.layout.values_in_keys else case.head_dim,
            lambda declared, case, dim: of_others(declared, case, head_dim=dim),
        ),
        Covered(
            "latent",
            "MLA latent width",
            lambda declared, mode: declared.heads.head_dims if latent(declared) else (),
            lambda declared, case: case.head_dim if case.heads.layout.values_in_keys else None,
            lambda declared, case, dim: of_mla(declared, case, head_dim=dim),
        ),
        Covered(
            "rope",
            "MLA rope width",
            lambda declared, mode: declared.heads.mla_rope_dims if latent(declared) else (),
            lambda declared, case: case.rope_dim if case.heads.layout.values_in_keys else None,
            lambda declared, case, dim: of_mla(declared, case, rope_dim=dim),
        ),
        Covered(
            "wider keys",
            "columns by which keys are wider than values",
            lambda declared, mode: declared.heads.wider_keys if _has_two_widths(declared) else (),
            lambda declared, case: _wider(case) or None,
            lambda declared, case, columns: of_others(declared, case, rope_dim=columns),
        ),
    ),
    simpler=of_number("head_dim", steps=smaller_declared("head_dim", lambda declared: declared.heads.head_dims)),
    undeclared=(_undeclared, _undeclared_wider),
    random=_random,
    varies="layer",
    apply=(OnLayers(_layers),),
)
