"""Columns of the covering array for layers with a recurrent state: kinds and widths, decays, lengths around a chunk,
and conventions of servers. Sizes and server variants are those of all families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..cases.case import Case, Heads
from ..cases.features.feature import Columns, Row
from ..cases.features.kv_layout import usual_layout
from ..cases.features.state import conv_windows_of
from ..cases.fields import Changes
from ..cases.head_layouts import state_heads
from ..cases.layers import PERIOD, Layers
from ..cases.rows import Accepted, Extend, Verify, room_for
from ..cases.state import EXACT_DATA, FAIR_ROUNDING, NEAR_EPSILON, STATE_DATA, StateShape
from ..cases.trees import chain
from ..contract import Capabilities, ForwardMode
from ..contract.state import FRESH, ORDERS, PADDED_STATES, ROLLBACKS, SLOTS_IN_DECODE, STATE_DTYPES
from ..contract.state_kind import STATE_KINDS

DRAWN = tuple(each for each in STATE_DATA if each not in (*EXACT_DATA, NEAR_EPSILON, FAIR_ROUNDING))
"""Data patterns that are not exact."""
_BATCHES: Mapping[str, tuple[int, ...]] = {
    "one": (5,), "three": (1, 70, 9), "fresh and begun": (0, 33, 0, 4), "many": (3, 1, 12, 7, 2, 20, 5),
}  # fmt: skip
"""Tokens before the step."""
CHUNK = 64
"""Tokens of a chunk in public kernels."""
_MOST_DIM = 64
"""Widest keys and values of a large batch, if narrower ones are not declared."""


def prompts(width: int) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Name -> tokens before the step and tokens of it. ``width``: W."""
    short = max(width - 2, 1)
    return {
        # A fresh prompt of one token next to others: it must not be treated as a decode (vLLM #51562).
        "one fresh token": ((0, 17, 0), (1, 1, 9)),
        # Shorter than the window: a part of the window before it stays.
        "within the window": ((30, 0, 5, 0), (short, short, max(width - 1, 1), width)),
        "chunk and one": ((0, 40), (CHUNK + 1, 3)),
        # The second request begins at no multiple of a chunk.
        "about a chunk": ((7, 0, 0), (CHUNK - 1, CHUNK, 2)),
        "tiles": ((0, 3, 0), (15, 16, 17)),
        "one": ((0,), (20,)),
        "begun": ((64,), (5,)),
    }


def kinds_of(declared: Capabilities) -> list[Heads]:
    """Heads of each declared kind, with the most value heads per key head."""
    return list({heads.family: heads for heads in state_heads(declared)}.values())


def rollbacks_of(declared: Capabilities) -> list[str]:
    """Declared rollbacks, the usual one first, that differ in target-verify."""
    found = rollbacks_of_instances(declared)
    return [each for each in found if each != SLOTS_IN_DECODE or "slots" not in found]


def rollbacks_of_instances(declared: Capabilities) -> list[str]:
    """Declared rollbacks, the usual one first."""
    return [each for each in ROLLBACKS if declared.state and each in declared.state.rollback]


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    state, verifies = declared.state, mode is ForwardMode.TARGET_VERIFY
    assert state is not None
    dims = sorted(declared.heads.head_dims & {64, 128} or declared.heads.head_dims)
    keys = sorted(state.k_dims & {64, 128} or state.k_dims)
    found: dict[str, Sequence[Any]] = {
        "heads": kinds_of(declared) if tier == "smoke" else state_heads(declared),
        "head_dim": dims[:1] if tier == "smoke" else dims[:2],
        "k_dim": keys[:1] if tier == "smoke" else keys[:2],
        "conv_width": sorted(state.conv_widths, reverse=True),
        "dtype": [each for each in ("bf16", "fp16", "fp32") if each in declared.precision.dtypes],
        "state_dtype": [each for each in STATE_DTYPES if each in state.dtypes],
        "lens": list(prompts(4) if mode is ForwardMode.EXTEND else _BATCHES),
        "data": DRAWN,
        "padding": ["prod", "nan", "stale"],
        "slack": [1, 0, 2],
        "padded_states": [each for each in PADDED_STATES if each in state.padding],
        "fresh": [each for each in FRESH if each in state.fresh],
        "order": [each for each in ORDERS if each in state.orders],
        "strided": [False, True] if state.strided else [False],
        "layer_ids": [Layers(), Layers(3, 5), Layers(1)],
        "snapshots": [0, *sorted(state.snapshots)],
    }
    if mode.is_draft_extend(include_v2=True) and not all(
        STATE_KINDS[name].in_drafts for name in declared.heads.families
    ):
        # A class that has other kinds, too, does not belong to a draft model.
        found["heads"] = []
    if mode is ForwardMode.DRAFT_EXTEND_V2:
        # Fewer rows than the window of a convolution has columns, as many, and more.
        found["accepted_of"] = sorted({min(each, declared.bounds.max_q_rows) for each in (2, 3, 6)})
    if verifies:
        # Nodes of a draft: fewer than a convolution has taps, as many, and more.
        found["nodes"] = sorted({min(each, declared.bounds.max_q_rows) for each in (2, 3, 4, 6)})
        found["rollback"] = rollbacks_of(declared)
    elif "source" in state.continues:
        found["continues"] = ["", "source"]
    if (windows := conv_windows_of(state, max(state.conv_widths), verifies=verifies)) != ["exact"]:
        found["conv_windows"] = windows
    return found


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    state, heads, width = declared.state, row["heads"], row["conv_width"]
    assert state is not None
    for name, dims in (("head_dim", declared.heads.head_dims), ("k_dim", state.k_dims)) if row.get("size") else ():
        if row[name] > max(min(dims), _MOST_DIM):
            raise ValueError(f"{name} {row[name]} is more than a large batch needs")
    kind = STATE_KINDS[heads.family]
    if not kind.convolves:
        if width > 1 and 1 in state.conv_widths:
            raise ValueError(f"layers of {heads.family} have no convolution")
        width = 1
    if not kind.recurs and width == 1:
        raise ValueError(f"layers of {heads.family} are a convolution")
    windows = conv_windows_of(state, width, verifies="nodes" in row)
    if row.get("conv_windows", "exact") not in windows and "exact" in state.conv_windows:
        raise ValueError("layers without a convolution have no window")
    shape = StateShape(
        row["k_dim"] if kind.recurs else 0, width, row["state_dtype"], row["padded_states"], row["fresh"],
        row["order"], row["strided"], row.get("rollback", ROLLBACKS[0]), row["snapshots"],
        continues=row.get("continues", ""),
        conv_windows=row["conv_windows"] if row.get("conv_windows") in windows else windows[0],
    )  # fmt: skip
    rows, slack = so_far["rows"], row["slack"]
    if isinstance(rows, Extend):
        prefixes, new = prompts(width)[row["lens"]]
        new = tuple(min(each, declared.bounds.max_extend_tokens) for each in new)
        rows, slack = Extend(new, room_for(new)), slack if rows.mode in declared.graph else 0
    else:
        prefixes = _BATCHES[row["lens"]]
        rows = Verify(chain(row["nodes"])) if "nodes" in row else rows
        if "accepted_of" in row:
            width = row["accepted_of"]
            rows = Accepted(tuple(1 + place % width for place in range(len(prefixes))), width, v2=True)
    return {
        "rows": rows,
        "page_size": min(declared.kv_pool.page_sizes),
        "prefixes": prefixes,
        "bucket": len(prefixes) + slack,
        "state": shape,
        **_model(declared, row["layer_ids"]),
    }


def _model(declared: Capabilities, layers: Layers) -> Changes:
    """Fields of these layers, with softmax layers between if the backend runs hybrid models."""
    if declared.state is None or not declared.state.hybrid:
        return {"layers": layers}
    # One layer would be one of a single kind.
    return {
        "layers": replace(layers, count=max(layers.count, PERIOD), hybrid=True), "kv_layout": usual_layout(declared)
    }  # fmt: skip


def with_softmax(declared: Capabilities, case: Case) -> Case:
    """The case, with alternating softmax layers if the backend runs hybrid models."""
    return case.with_changes(**_model(declared, case.layers))


STATES = Columns(_columns, _of_row, further=("continues", "conv_windows"))
