"""The recurrent states of layers that keep one: widths, dtype, and the conventions of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...contract import BackendContext, Capabilities, ForwardMode
from ...contract.state import (
    CONTINUES,
    CONV_WINDOWS,
    FRESH,
    ORDERS,
    PADDED_STATES,
    ROLLBACKS,
    ROUNDINGS,
    SLOTS_IN_DECODE,
    SLOTS_MOVED,
    STATE_DTYPES,
    State,
)
from ...contract.state_kind import STATE_KINDS
from ...glossary import Entry
from ..fields import Changes, Fields
from ..head_layouts import declared_layouts
from ..rows import Decode, Extend, Verify
from ..state import EXACT_GATES, FAIR_ROUNDING, NEAR_EPSILON, PASSED_ON, PATTERN, STATE_DATA, StateShape
from ..trees import chain
from .feature import Asked, Bound, Covered, Draws, Feature, Trait, Without, Word, of_fields
from .outside import first_undeclared, with_layers

_SETS = {
    "k_dim": "k_dims", "conv_width": "conv_widths", "dtype": "dtypes", "padding": "padding", "fresh": "fresh",
    "order": "orders", "rollback": "rollback", "rounding": "rounding",
}  # fmt: skip
"""Field of ``StateShape`` -> field of ``State`` that lists its values."""
_ORDER = {
    "dtype": STATE_DTYPES,
    "padding": PADDED_STATES,
    "fresh": FRESH,
    "order": ORDERS,
    "rollback": ROLLBACKS,
    "rounding": ROUNDINGS,
}
"""Order of values, the usual one first."""


def _sorted(declared: State, name: str) -> list[Any]:
    values = getattr(declared, _SETS[name])
    return [each for each in _ORDER[name] if each in values] if name in _ORDER else sorted(values)


def _words(case: Fields) -> str:
    each = case.state
    if each is None:
        return "layers without a state"
    conv = f"a convolution of {each.conv_width}" if each.conv_width > 1 else "no convolution"
    if not each.recurs:
        return f"{conv} and no recurrence ({each})"
    return f"{each.dtype} states with keys of {each.k_dim} and {conv} ({each})"


_CONVENTIONS = {
    "null": "padded requests have index 0 and are skipped",
    "slot0": "padded requests have index 0 and are stored",
    "zeroed": "the server clears slots of fresh requests",
    "copied": "requests continue states that the server has copied",
    "source": "requests continue states of other slots",
    "tapsfirst": "windows have columns after those that taps read",
    "newestlast": "windows have columns before those that taps read, of older inputs",
    "kv": "states are [Hv, K, V]",
    "slots": "a slot for each node of a draft",
    SLOTS_IN_DECODE: "a slot for each node of a draft, which a decode without a draft gets, too",
    SLOTS_MOVED: "a slot for each node of a draft, of which the accepted one is moved to the first",
    "strided": "there are gaps between slots",
    "stochastic": "states are rounded stochastically",
    "bigpool": "a pool of more than 2^31 elements",
}
"""Word of ``StateShape`` after its sizes -> its meaning."""


def _phrase(case: Fields) -> str:
    if case.state is None:
        return ""
    phrases = [phrase for word, phrase in _CONVENTIONS.items() if word in str(case.state).split(".")]
    chunks = f"states are copied at the ends of chunks of {case.state.snapshots}"
    return "; ".join([_words(case), *phrases, *([chunks] if case.state.snapshots else [])])


def _declared(declared: Capabilities, case: Fields) -> bool:
    state, each = declared.state, case.state
    if state is None or each is None:
        return state is None and each is None
    # Nothing is taken back outside of target-verify, and some kinds have no convolution.
    kind = STATE_KINDS[case.heads.family]
    without = {"rollback": case.tree is None, "conv_width": not kind.convolves, "k_dim": not kind.recurs}
    asked = {one: many for one, many in _SETS.items() if not without.get(one)}
    return (
        all(getattr(each, one) in getattr(state, many) for one, many in asked.items())
        and (state.strided or not each.strided)
        and each.snapshots in state.snapshots | {0}
        and each.continues in state.continues | {""}
        and (each.conv_width == 1 or each.conv_windows in state.conv_windows)
        and (state.plain_convolution or case.data not in PASSED_ON)
    )


def _runs_in_drafts(case: Fields) -> bool:
    """True if layers of a draft model may be of the case's kind, and run in its mode."""
    kind = case.heads.layout.state_kind
    return kind is not None and kind.in_drafts and case.mode is ForwardMode.DRAFT_EXTEND_V2


def _branches(case: Fields) -> bool:
    return case.topk > 1


def _goes_by_trees(declared: Capabilities, kind: str, rollback: str) -> bool:
    """True if drafts of layers of a kind may branch, with a rollback."""
    return declared.state is None or (kind in declared.state.trees and rollback == "commit")


def _tree_declared(declared: Capabilities, case: Fields) -> bool:
    if case.state is None or not _branches(case):
        return True
    return _goes_by_trees(declared, case.heads.family, case.state.rollback)


def nearest_state(declared: State, shape: StateShape | None, kind: str, *, verifies: bool) -> StateShape:
    """The declared shape that is nearest to ``shape``. ``kind``: kind of the layers.
    ``verifies``: True for target-verify.
    """
    found = {name: _sorted(declared, name)[0] for name in _SETS}
    for name in _SETS if shape else ():
        if getattr(shape, name) in getattr(declared, _SETS[name]):
            found[name] = getattr(shape, name)
    found |= sizes_of_kind(declared, kind, found["k_dim"], found["conv_width"])
    if not verifies:
        found["rollback"] = ROLLBACKS[0]
    if verifies or found["dtype"] == "fp32" or not STATE_KINDS[kind].recurs:
        found["rounding"] = ROUNDINGS[0]
    windows = conv_windows_of(declared, found["conv_width"], verifies=verifies)
    conv_windows = shape.conv_windows if shape and shape.conv_windows in windows else windows[0]
    each = shape.snapshots if shape and shape.snapshots in declared.snapshots and found["rollback"] == "commit" else 0
    strided, big = declared.strided and bool(shape and shape.strided), bool(shape and shape.big)
    continues = shape.continues if shape and shape.continues in declared.continues and not verifies else ""
    return StateShape(**found, strided=strided, snapshots=each, big=big, continues=continues, conv_windows=conv_windows)


def sizes_of_kind(declared: State, kind: str, k_dim: int, conv_width: int) -> dict[str, int]:
    """Width of a key and taps of a convolution, as fields of ``StateShape``, if layers of a kind have both."""
    of = STATE_KINDS[kind]
    if not of.convolves:
        conv_width = 1
    elif conv_width == 1 and not of.recurs:
        conv_width = max(declared.conv_widths)
    return {"k_dim": k_dim if of.recurs else 0, "conv_width": conv_width}


def conv_windows_of(declared: State, conv_width: int, *, verifies: bool) -> list[str]:
    """Declared windows of a convolution with this number of taps, the usual one first."""
    if conv_width == 1 or verifies:
        return [CONV_WINDOWS[0]]
    return [each for each in CONV_WINDOWS if each in declared.conv_windows]


def _fit(declared: Capabilities, case: Fields) -> Changes:
    if not case.heads.layout.has_state:
        return {"state": None}
    data = case.data if case.data in STATE_DATA and not _without_data(case) else STATE_DATA[0]
    verifies = case.tree is not None or case.by_slots
    shape = (
        case.state
        if declared.state is None
        else nearest_state(declared.state, case.state, case.heads.family, verifies=verifies)
    )
    if shape is not None and isinstance(case.rows, Extend):
        shape = replace(shape, rounding=ROUNDINGS[0])
    if shape is not None and isinstance(case.rows, Decode) and case.heads.layout.is_leveled:
        shape = replace(shape, continues="")
    if data == FAIR_ROUNDING and (shape is None or shape.rounding == ROUNDINGS[0]):
        data = STATE_DATA[0]
    found: Changes = {"state": shape, "data": data}
    if case.tree is not None and _branches(case) and shape and not _goes_by_trees(
        declared, case.heads.family, shape.rollback
    ):  # fmt: skip
        found = {**found, "rows": Verify(chain(len(case.tree)))}
    return found


def _other_dtype(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    state = context.state
    if state is None or declared.state is None:
        return None
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    other = next((name for name in STATE_DTYPES if name not in declared.state.dtypes), None)
    if other is None:
        return None
    old = state.pool
    return f"states in {other}", replace(context, state=replace(state, pool=old.like(old.device, dtypes[other])))


def _other_width(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    state = context.state
    if state is None or declared.state is None or not state.layers[0].of_kind.recurs:
        return None
    width = first_undeclared((96, 48, 24), declared.state.k_dims)
    other = with_layers(replace(context, layers=state.layers), head_dim=width)
    return f"keys of width {width}", replace(other, state=replace(state, layers=other.layers))  # type: ignore[arg-type]


def _other_trees(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    state = context.state
    if state is None or declared.state is None or declared.bounds.max_topk < _TOPK:
        return None
    kind = state.layers[0].kind
    if kind in declared.state.trees or ForwardMode.TARGET_VERIFY not in context.modes:
        return None
    return f"drafts that branch, in layers of kind {kind}", replace(context, topk=_TOPK)


_TOPK = 2


def _convention(
    name: str, values: tuple[str, ...], *, only_verify: bool = False
) -> Callable[..., tuple[str, BackendContext] | None]:
    def undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
        if context.state is None or declared.state is None:
            return None
        other = next((value for value in values if value not in getattr(declared.state, name)), None)
        if other is None or (only_verify and ForwardMode.TARGET_VERIFY not in context.modes):
            return None
        changes: dict[str, Any] = {name: other}
        return f"{name} {other} of states", replace(context, state=replace(context.state, **changes))

    return undeclared


def _other_windows(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    state = context.state
    if state is None or not any(layer.conv_width > 1 for layer in state.layers):
        return None
    return _convention("conv_windows", CONV_WINDOWS)(declared, context)


def _covered(name: str, words: str) -> Covered:
    def make(declared: Capabilities, case: Fields, value: Any) -> Changes:
        return {"state": replace(case.state, **{name: value})} if case.state and _has(case.heads.family) else {}

    def _has(kind: str) -> bool:
        return name != "k_dim" or STATE_KINDS[kind].recurs

    return Covered(
        f"state {name}",
        words,
        lambda declared, mode: (
            getattr(declared.state, _SETS[name]) if declared.state and any(map(_has, declared.heads.families)) else ()
        ),
        lambda declared, case: getattr(case.state, name) if case.state else None,
        make,
    )


def _made_with_snapshots(declared: Capabilities, case: Fields, value: Any) -> Changes:
    return {"state": replace(case.state, snapshots=value, rollback="commit")} if case.state else {}


def _continued_in(declared: Capabilities, mode: ForwardMode) -> list[str]:
    """Ways in which requests of a mode continue states of a prefix cache."""
    plain = any(layout.has_state and not layout.is_leveled for layout in declared_layouts(declared))
    ways = {ForwardMode.EXTEND: CONTINUES, ForwardMode.DECODE: ("source",) * plain}.get(mode, ())
    return [each for each in ways if declared.state and each in declared.state.continues]


def _longer_windows(declared: Capabilities, mode: ForwardMode) -> list[str]:
    """Declared windows of a mode with more columns than taps read."""
    state = declared.state
    if state is None or mode.is_target_verify() or declared.heads.families == {"lightning"}:
        return []
    return [each for each in CONV_WINDOWS[1:] if each in state.conv_windows and max(state.conv_widths) > 1]


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
    drawn = {name: draws.one_of(_sorted(state, name)) for name in _SETS if name not in ("rollback", "rounding")}
    rows, changes = so_far["rows"], dict[str, Any]()
    if isinstance(rows, Verify):
        branches = rows.tree.topk > 1
        if branches and so_far["heads"].family not in state.trees:
            branches, changes = False, {"rows": Verify(chain(len(rows.tree)))}
        drawn["rollback"] = "commit" if branches else draws.one_of(_sorted(state, "rollback"))
    each = draws.one_of([0, *sorted(state.snapshots)]) if drawn.get("rollback") not in ROLLBACKS[1:] else 0
    strided, continues = state.strided and draws.one_of([False, True]), ""
    if isinstance(rows, Decode) or (isinstance(rows, Extend) and rows.chunks == 1):
        mode = ForwardMode.DECODE if isinstance(rows, Decode) else ForwardMode.EXTEND
        continues = draws.one_of(["", *_continued_in(declared, mode)])
        if mode is ForwardMode.DECODE and so_far["heads"].layout.is_leveled:
            continues = ""
    if not STATE_KINDS[so_far["heads"].family].recurs:
        drawn |= sizes_of_kind(state, so_far["heads"].family, 0, drawn["conv_width"])
    windows = conv_windows_of(state, drawn["conv_width"], verifies=isinstance(rows, Verify))
    drawn["conv_windows"] = draws.one_of(windows) if len(windows) > 1 else windows[0]
    shape = StateShape(**drawn, strided=strided, snapshots=each, continues=continues)
    return {**changes, "state": shape}


def _wrong(case: Fields) -> str:
    if case.heads.layout.has_state != (case.state is not None):
        return f"heads {case.heads} and {case.state or 'no state'}: layers of {case.heads.family} " + (
            "keep a state; add its widths, such as k64w4s32" if case.state is None else "keep none"
        )
    if case.state and case.state.recurs != STATE_KINDS[case.heads.family].recurs:
        return f"{case.state}: layers of {case.heads.family} " + (
            "have no keys; their width is 0, as in k0w3s32" if case.state.recurs else "have keys of a width above 0"
        )
    if case.state and not case.state.recurs and case.state.conv_width == 1:
        return f"{case.state}: layers without a recurrence are a convolution of 2 taps or more"
    if case.state and case.state.conv_width == 1 and case.state.has_longer_windows:
        return f"{case.state}: layers without a convolution have no window"
    if case.state and isinstance(case.rows, Extend) and (0, 0) in zip(case.prefixes, case.rows.new, strict=True):
        return "a request without rows and without tokens before the step has no state to keep"
    return f"data {case.data}: {why}" if (why := _without_data(case)) else ""


def _without_data(case: Fields) -> str:
    """The reason why layers of the case's kind cannot show what its data pattern is made for; empty if they can."""
    kind = case.heads.layout.state_kind
    if case.data in (*PASSED_ON, NEAR_EPSILON) and kind and not kind.recurs:
        return f"layers of {kind.name} have no state"
    if case.data == FAIR_ROUNDING and case.state and case.state.rounding != "stochastic":
        return "states are rounded to the nearest number"
    if case.data == NEAR_EPSILON and not (kind and kind.normalizes):
        return f"layers of {case.heads.family} do not divide queries and keys by their norm"
    if case.data != EXACT_GATES:
        return ""
    if kind and kind.fixed_decay:
        return f"all tokens of a head of {kind.name} have one decay"
    # The step of such a row is 2^38 times as large as that of the others.
    return "steps of Mamba2 for decays of 0 and of 1 do not both fit in fp16" if _is_narrow_mamba(case) else ""


def _is_narrow_mamba(case: Fields) -> bool:
    kind = case.heads.layout.state_kind
    return kind is not None and kind.steps and case.dtype == "fp16"


STATE = Feature(
    name="state",
    order=270,
    fields=("state",),
    traits=(
        Trait(
            "states",
            lambda case: case.state is not None,
            excludes={
                "layer options": "windows, soft caps, sinks and selections apply to keys",
                "FP8 pool": "a layer that keeps a state has no KV pool",
                "KV splits": "a layer that keeps a state has no keys to split",
                "KV groups": "a layer that keeps a state has no KV pool",
                "heads by layer": "all layers of a case have states of one shape",
            },
        ),
        Trait(
            "states of no draft model",
            lambda case: case.state is not None and not _runs_in_drafts(case),
            excludes={
                "rows of a draft model": "layers of a draft model are attention layers or convolutions",
            },
        ),
        Trait(
            "rollback of states by slots",
            lambda case: case.by_slots and (case.tree is not None or case.instance_of is None),
            excludes={
                "no draft to verify": "only rejected nodes are rolled back",
                "branching trees": "with a slot for each node a draft is a chain",
                "snapshots of states": "a request has a slot for each node already",
            },
        ),
        Trait("states of prompts", lambda case: case.state is not None and case.mode is ForwardMode.EXTEND),
        Trait("states of drafts", lambda case: case.state is not None and case.tree is not None),
        Trait("snapshots of states", lambda case: case.state is not None and case.state.snapshots > 0),
        Trait(
            "longer windows of a convolution",
            lambda case: case.state is not None and case.state.has_longer_windows,
            excludes={
                "drafts to verify": "with slots for nodes windows are longer anyway, and a commit copies W - 1 columns",
            },
        ),
        Trait(
            "states of a prefix cache",
            lambda case: case.state is not None and bool(case.state.continues),
            excludes={
                "drafts to verify": "a request in target-verify has its own state",
                "chunks": "the second chunk of a prompt continues the request's own state",
                "loop": "a loop continues the states of its own requests",
                "multi-mode instance": "only one mode of the instance would continue them",
            },
        ),
        Trait(
            "copies of states before a step",
            lambda case: case.state is not None and case.state.continues == "copy",
            excludes={
                "no prompts": "a server copies a state to a request that it admits",
            },
        ),
        Trait(
            "states that are rounded stochastically",
            lambda case: case.state is not None and case.state.rounding == "stochastic",
            excludes={
                "no recurrence": "there is no state to round",
                "states of prompts": "chunked kernels round states to the nearest number",
                "drafts to verify": "servers round states of drafts to the nearest number",
                "loop": "tokens of plain decoding would differ from run to run",
                "multi-mode instance": "only its decodes would round stochastically",
                "states in fp32": "a state in fp32 is stored as it is computed",
            },
        ),
        Trait("no recurrence", lambda case: case.state is not None and not case.state.recurs),
        Trait(
            "states of several levels",
            lambda case: case.heads.layout.is_leveled,
            excludes={
                "memory from another instance": "the heads of a rank are in several places of a slot",
                "offloading": "the heads of a slot are in several places of it",
                "rows on ranks": "levels follow from the tokens before a row, which are on other ranks",
                "decodes that continue states of other slots": "levels follow from a length, and each request has its "
                "own",
            },
        ),
        Trait(
            "decodes that continue states of other slots",
            lambda case: case.state is not None and case.state.continues == "source" and isinstance(case.rows, Decode),
        ),
        Trait("states in fp32", lambda case: case.state is not None and case.state.dtype == "fp32"),
        Trait("no states", lambda case: case.state is None),
    ),
    wrong=_wrong,
    words=(
        Word(
            PATTERN,
            lambda match, so_far: {"state": StateShape.read(match)},
            lambda case: str(case.state or ""),
            bounds=(
                Bound("width of a key", 0, 1024),
                Bound("width of the convolution", 1, 16, 2),
                Bound("length of a chunk with snapshots", 1, 1024, 5),
            ),
        ),
    ),
    explained=(
        Entry(
            "recurrent state",
            "What a layer of GDN, KDA, Mamba2, Lightning or RWKV-7 remembers of a request: a matrix per value head, "
            "whatever the length. Log-linear attention has one per level.",
            also=("state", "states", "SSM state", "temporal state"),
            page="how-to/recurrent-states.md",
        ),
        Entry(
            "convolution window",
            "The last W - 1 inputs of each channel, which the next row's convolution needs.",
            also=("conv state", "window of inputs"),
            page="how-to/recurrent-states.md",
        ),
        Entry(
            "fresh request",
            "A request without a token before the step. Its state begins from zeros, whatever its slot holds.",
            also=("fresh",),
            page="how-to/recurrent-states.md",
        ),
        Entry(
            "commit",
            "After a target-verify of states: the state after the last accepted node becomes that of the slot.",
            also=("rollback",),
            page="how-to/recurrent-states.md",
        ),
        Entry(
            "scratch",
            "Memory for window and state after each node of a draft, until some of them are accepted.",
            also=("intermediate states",),
            page="how-to/recurrent-states.md",
        ),
        Entry(
            "k64w4s32",
            "Recurrent states with keys of width 64, a convolution of 4 taps, and states in fp32.",
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "k64w4s32.tapsfirst",
            "Recurrent states whose windows have more columns than taps read, after the last inputs; `newestlast`: "
            "before them.",
            also=("tapsfirst", "newestlast", "longer window"),
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "k0w3s32",
            "Layers that compute nothing but a convolution, of 3 taps: a slot has a window and no state.",
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "k128w1sb16",
            "Recurrent states with keys of width 128, no convolution, and states in bf16.",
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "k64w4s32.null.zeroed.kv.strided",
            "Recurrent states, with conventions of a server: how padded requests are marked, who clears "
            "slots, how drafts are rolled back, and how states lie.",
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
    ),
    describe=lambda case: {"state": _phrase(case)},
    declared=(
        Asked(_words, _declared),
        Asked(lambda case: f"a tree that branches, in layers of kind {case.heads.family}", _tree_declared),
    ),
    fit=_fit,
    values=Without("catalogue/state_columns.py has the columns of states."),
    covered=(
        _covered("k_dim", "width of a key"),
        _covered("conv_width", "width of a convolution"),
        _covered("dtype", "state dtype"),
        _covered("padding", "padded states"),
        _covered("fresh", "fresh states"),
        _covered("order", "order of a state"),
        Covered(
            "state rounding",
            "rounding of states",
            lambda declared, mode: declared.state.rounding if declared.state and mode is ForwardMode.DECODE else (),
            lambda declared, case: case.state.rounding if case.state else None,
            lambda declared, case, value: {"state": replace(case.state, rounding=value)} if case.state else {},
        ),
        Covered(
            "state rollback",
            "rollback of states by",
            lambda declared, mode: declared.state.rollback if declared.state and mode.is_target_verify() else (),
            lambda declared, case: case.state.rollback if case.state and case.tree is not None else None,
            lambda declared, case, value: {"state": replace(case.state, rollback=value)} if case.state else {},
        ),
        Covered(
            "state snapshots",
            "snapshots of states each",
            lambda declared, mode: declared.state.snapshots if declared.state else (),
            lambda declared, case: case.state.snapshots or None if case.state else None,
            _made_with_snapshots,
        ),
        Covered(
            "state continues",
            "states of a prefix cache by",
            _continued_in,
            lambda declared, case: case.state.continues or None if case.state else None,
            lambda declared, case, value: {"state": replace(case.state, continues=value)} if case.state else {},
        ),
        Covered(
            "state windows",
            "windows of a convolution",
            _longer_windows,
            lambda declared, case: case.state.conv_windows if case.state and case.state.has_longer_windows else None,
            lambda declared, case, value: (
                {"state": replace(case.state, conv_windows=value)} if case.state and case.state.conv_width > 1 else {}
            ),
        ),
        Covered(
            "state slots",
            "slots of states",
            lambda declared, mode: ["strided"] if declared.state and declared.state.strided else (),
            lambda declared, case: "strided" if case.state and case.state.strided else None,
            lambda declared, case, value: {"state": replace(case.state, strided=True)} if case.state else {},
        ),
    ),
    simpler=of_fields("state", steps=_simpler),
    undeclared=(
        _other_dtype,
        _other_width,
        _other_trees,
        _convention("padding", PADDED_STATES),
        _convention("fresh", FRESH),
        _convention("rounding", ROUNDINGS),
        _convention("rollback", ROLLBACKS, only_verify=True),
        _convention("continues", CONTINUES),
        _other_windows,
    ),
    random=_random,
    varies="instance",
    apply=Without("families/recurrent/data.py makes the layers and the states, and the harness the pool."),
)
