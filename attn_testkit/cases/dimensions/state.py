"""The recurrent states of layers that keep one: widths, dtype, and the conventions of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...contract import BackendContext, Capabilities
from ...contract.state import FRESH, ORDERS, PADDED_STATES, STATE_DTYPES, State
from ..fields import Changes, Fields
from ..state import PATTERN, STATE_DATA, StateShape
from .dimension import Asked, Bound, Covered, Dimension, Draws, Kept, Without, Word, of_fields
from .outside import first_undeclared, with_layers

__all__ = ["STATE", "nearest_state"]

_SETS = {
    "k_dim": "k_dims", "conv_width": "conv_widths", "dtype": "dtypes", "padding": "padding", "fresh": "fresh",
    "order": "orders",
}  # fmt: skip
"""Field of ``StateShape`` -> field of ``State`` that lists its values."""
_ORDER = {"dtype": STATE_DTYPES, "padding": PADDED_STATES, "fresh": FRESH, "order": ORDERS}
"""Values with the usual one first."""


def _sorted(declared: State, name: str) -> list[Any]:
    values = getattr(declared, _SETS[name])
    return [each for each in _ORDER[name] if each in values] if name in _ORDER else sorted(values)


def _words(case: Fields) -> str:
    each = case.state
    if each is None:
        return "layers without a state"
    conv = f"a convolution of {each.conv_width}" if each.conv_width > 1 else "no convolution"
    return f"{each.dtype} states with keys of {each.k_dim} and {conv} ({each})"


def _declared(declared: Capabilities, case: Fields) -> bool:
    state, each = declared.state, case.state
    if state is None or each is None:
        return state is None and each is None
    return all(getattr(each, one) in getattr(state, many) for one, many in _SETS.items()) and (
        state.strided or not each.strided
    )


def nearest_state(declared: State, shape: StateShape | None, kind: str) -> StateShape:
    """The declared shape that is nearest to ``shape``. ``kind``: of the layers; Lightning has no convolution."""
    found = {name: _sorted(declared, name)[0] for name in _SETS}
    for name in _SETS if shape else ():
        if getattr(shape, name) in getattr(declared, _SETS[name]):
            found[name] = getattr(shape, name)
    if kind == "lightning":
        found["conv_width"] = 1
    return StateShape(**found, strided=declared.strided and bool(shape and shape.strided))


def _fit(declared: Capabilities, case: Fields) -> Changes:
    if not case.heads.layout.has_state:
        return {"state": None}
    data = case.data if case.data in STATE_DATA else STATE_DATA[0]
    shape = case.state if declared.state is None else nearest_state(declared.state, case.state, case.heads.family)
    return {"state": shape, "data": data}


def _other_dtype(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    state = context.state
    if state is None or declared.state is None:
        return None
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    other = next((name for name in STATE_DTYPES if name not in declared.state.dtypes), None)
    if other is None:
        return None
    old = state.pool
    pool = type(old)(old.num_slots, old.layers, old.conv_dtype, dtypes[other], old.device, old.order)
    return f"states in {other}", replace(context, state=replace(state, pool=pool))


def _other_width(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    state = context.state
    if state is None or declared.state is None:
        return None
    width = first_undeclared((96, 48, 24), declared.state.k_dims)
    other = with_layers(replace(context, layers=state.layers), head_dim=width)
    return f"keys of width {width}", replace(other, state=replace(state, layers=other.layers))  # type: ignore[arg-type]


def _convention(name: str, values: tuple[str, ...]) -> Callable[..., tuple[str, BackendContext] | None]:
    def undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
        if context.state is None or declared.state is None:
            return None
        other = next((value for value in values if value not in getattr(declared.state, name)), None)
        if other is None:
            return None
        changes: dict[str, Any] = {name: other}
        return f"{name} {other} of states", replace(context, state=replace(context.state, **changes))

    return undeclared


def _covered(name: str, words: str) -> Covered:
    def make(declared: Capabilities, case: Fields, value: Any) -> Changes:
        return {"state": replace(case.state, **{name: value})} if case.state else {}

    return Covered(
        f"state {name}",
        words,
        lambda declared, mode: getattr(declared.state, _SETS[name]) if declared.state else (),
        lambda declared, case: getattr(case.state, name) if case.state else None,
        make,
    )


def _simpler(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    each, plain = case.state, minimal.state
    if each is not None and plain is not None:
        for name, value in vars(plain).items():
            if getattr(each, name) != value:
                yield {"state": replace(each, **{name: value})}


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    state = declared.state
    if state is None:
        return {}
    drawn = {name: draws.one_of(_sorted(state, name)) for name in _SETS}
    return {"state": StateShape(**drawn, strided=state.strided and draws.one_of([False, True]))}


STATE = Dimension(
    name="state",
    fields=("state",),
    words=(
        Word(
            PATTERN,
            lambda match, so_far: {"state": StateShape.read(match)},
            lambda case: str(case.state or ""),
            bounds=(Bound("width of a key", 1, 1024), Bound("width of the convolution", 1, 16, 2)),
        ),
    ),
    describe=lambda case: {"state": _words(case) if case.state else ""},
    declared=(Asked(_words, _declared),),
    fit=_fit,
    values=Without("catalogue/state_cases.py makes the cases of states."),
    combined=Kept(("state",)),
    covered=(
        _covered("k_dim", "width of a key"),
        _covered("conv_width", "width of a convolution"),
        _covered("dtype", "state dtype"),
        _covered("padding", "padded states"),
        _covered("fresh", "fresh states"),
        _covered("order", "order of a state"),
    ),
    simpler=of_fields("state", steps=_simpler),
    undeclared=(_other_dtype, _other_width, _convention("padding", PADDED_STATES), _convention("fresh", FRESH)),
    random=_random,
    varies="instance",
    apply=Without("families/recurrent/data.py makes the layers and the states, and the harness the pool."),
)
