"""The case nearest to each batch of a record, with the properties of the batch that no case has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from attn_testkit.cases.case import Case, Heads
from attn_testkit.cases.declared import not_declared
from attn_testkit.cases.draft import Draft
from attn_testkit.cases.features.kv_layout import usual_layout
from attn_testkit.cases.nearest_declared import nearest_declared
from attn_testkit.cases.rows import Accepted, Decode, Drafted, Extend, Verify, room_for
from attn_testkit.cases.state import STATE_DATA, StateShape
from attn_testkit.cases.trees import Tree, chain
from attn_testkit.contract import Capabilities, ForwardMode

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
STATE_KINDS = {"gdn": "gdn", "kda": "kda", "mamba2": "mamba", "lightning": "lightning", "linear": "lightning"}
"""Part of the name that a server has for a kind of layers with a state -> kind."""
KV_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e4m3": "fp8_e4m3", "auto": "same"}
MODES = {**{mode.value: mode for mode in ForwardMode}, "mixed": ForwardMode.EXTEND}
"""Servers' name of a mode -> mode. A batch of prompts and decodes is an extend."""


class Unreadable(ValueError):
    """A file that is not a record."""


class _NoCase(Exception):
    """Reason why a batch has no case."""


@dataclass
class Recorded:
    """Cases made from a record."""

    cases: dict[str, Case] = field(default_factory=dict)
    """Case id -> case, in the order of the record."""
    differs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Case id -> properties in which the case differs from the batch."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason why a line gave no case -> number of such lines."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a record, without incomplete ones. Raises ``Unreadable``, or ``OSError``."""
    lines = []
    texts = path.read_text("utf-8").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(texts):
                break  # the process was killed while it wrote
            expected = "expected a recording, which `attn-testkit record --to FILE -- COMMAND` writes"
            raise Unreadable(f"{path}, line {number} is not JSON: {error}; {expected}") from None
        if not isinstance(line, dict) or line.get("line") not in ("batch", "layer", "commit"):
            raise Unreadable(f"{path}, line {number}: expected a line that `attn-testkit record` wrote")
        lines.append(line)
    return lines


def cases_of(lines: Iterable[Mapping[str, Any]], declared: Capabilities | None = None) -> Recorded:
    """A case for each batch whose layers and lengths are known, and another one for its layers with a state. With
    ``declared``, only declared cases in declared layouts are returned; for a hybrid model, only cases of the layers
    that the backend supports."""
    lines = list(lines)
    layers: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["line"] == "layer":
            layers.setdefault(_instance(line), []).append(line)
    committed = {_instance(line) for line in lines if line["line"] == "commit"}
    found = Recorded()
    for line in lines:
        if line["line"] != "batch":
            continue
        of_line = layers.get(_instance(line), [])
        makers: list[Callable[[], tuple[Case, list[str]]]] = []
        if "state" in line and (declared is None or declared.state is not None):
            makers.append(partial(_case_of_states, line, _instance(line) in committed))
        if (of_line or "state" not in line) and (declared is None or declared.state is None or not makers):
            makers.append(partial(_case_of, line, of_line))
        for make in makers:
            try:
                case, differs = make()
                if declared is not None:
                    case = _as_they_hold_it(declared, case)
            except _NoCase as why:
                found.skipped[str(why)] += 1
            except (KeyError, TypeError, ValueError) as error:
                found.skipped[f"no case can be made of it: {type(error).__name__}: {error}"] += 1
            else:
                found.cases.setdefault(case.id, case)
                found.differs.setdefault(case.id, tuple(differs))
    return found


def _as_they_hold_it(declared: Capabilities, case: Case) -> Case:
    """The case in the declared KV layout; a similar one if it is not declared."""
    case = case.with_changes(kv_layout=usual_layout(declared))
    case = nearest_declared(declared, case) if not_declared(declared, case) else case
    lacking = not_declared(declared, case)
    if lacking:
        raise _NoCase(f"not declared: {lacking}")
    return case


def _instance(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return line.get("process"), line.get("backend"), line.get("instance")


def _case_of(line: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> tuple[Case, list[str]]:
    mode = _mode(line)
    if line["how"] == "capture":
        raise _NoCase("planned for a capture: lengths are fill values, and its replays have the real ones")
    if not line["requests"]:
        raise _NoCase("no live request")
    if not layers:
        raise _NoCase("planned, but no layer ran")
    first = layers[0]
    differs: list[str] = []
    of_layers = _of_layers(layers, differs)
    rows = _rows(mode, line, differs)
    differs.append("slots: the case lays tokens out in shuffled pages")
    case = Case(
        dtype=_word("dtype", first["dtype"], DTYPES),
        kv_dtype=_kv_dtype(first),
        page_size=line.get("page_size") or first.get("page_size") or _unknown("the page size"),
        bucket=max(line["requests"], line["padded_to"] if line["how"] == "replay" else 0),
        layout="shuffled",
        **of_layers,
        **rows,
    )
    return case, differs


_OF_TARGETS = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY)
_ROLLBACK = "commit"


def _case_of_states(line: Mapping[str, Any], commits: bool) -> tuple[Case, list[str]]:
    """The case of the layers of a batch that keep a state. ``commits``: whether its instance committed any."""
    mode, held = _mode(line), line["state"]
    if line["how"] == "capture":
        raise _NoCase("planned for a capture: lengths are fill values, and its replays have the real ones")
    if not line["requests"]:
        raise _NoCase("no live request")
    if mode not in _OF_TARGETS:
        raise _NoCase(f"mode {mode.value}: layers of a draft model keep no state")
    if "unreadable" in held:
        raise _NoCase(f"the memory of {held['kind']}'s states was not found: {held['unreadable']}")
    differs = [
        "slots of states: the case has other slots, and none of them equals a row of a table or a position in the batch"
    ]
    rows = _rows(mode, line, differs)
    shape, heads, head_dim = _state_shape(held)
    verifies = mode is ForwardMode.TARGET_VERIFY
    if line.get("bounds"):
        differs.append("lengths: the host had only an upper bound, as with asynchronous scheduling")
    if verifies:
        differs.append("accepted nodes: the case accepts all nodes, the fewest, and different numbers")
        if held["rollback"] == _ROLLBACK and not commits:
            differs.append("commits: the backend got no commit call, so no accepted state was stored (sglang #26351)")
    copies = held["copies"] if held["rollback"] == _ROLLBACK else 0
    if copies:
        differs.append("copies for the prefix cache: the case has such copies for two thirds of the requests")
    if mode is ForwardMode.EXTEND and held.get("has_prefix_states"):
        differs.append(
            "slots that are read: in the case all requests that continue a state read other slots than they write"
        )
    window_dtype = held["window_dtype"] if shape.conv_width > 1 else "bfloat16"
    if shape.conv_width == 1:
        differs.append("dtype: it is not recorded without a convolution, so the case has bf16")
    case = Case(
        heads=heads, head_dim=head_dim, dtype=_word("dtype", window_dtype, DTYPES), page_size=_PAGE,
        bucket=max(line["requests"], line["padded_to"] if line["how"] == "replay" else 0), layout="shuffled",
        data=STATE_DATA[0],
        state=replace(
            shape, rollback=held["rollback"] if verifies else _ROLLBACK, padding=held["padding"], snapshots=copies,
            order=held.get("order", "vk"), continues="source" if held.get("has_prefix_states") and not verifies else "",
        ),
        **rows,
    )  # fmt: skip
    return case, differs


_PAGE = 16
"""Page size for layers with a state: these have no pages, but cases need a number."""


def _state_shape(held: Mapping[str, Any]) -> tuple[StateShape, Heads, int]:
    """Shape of the states, heads, and width of a value."""
    found = (kind for name, kind in STATE_KINDS.items() if name in held["kind"].lower() or held["kind"] == kind)
    kind = next(found, None)
    if kind is None:
        raise _NoCase(f"states of {held['kind']}: the kit has {', '.join(dict.fromkeys(STATE_KINDS.values()))}")
    if len(held["shape"]) != 3:
        raise _NoCase(f"states of {kind} of shape {held['shape']}: expected [heads, width of a value, width of a key]")
    (heads, values, keys), window = held["shape"], held["window"]
    dtype = _word("state dtype", held["dtype"], DTYPES)
    if kind == "lightning":
        return StateShape(keys, 1, dtype), Heads(kind, heads, heads), values
    if len(window) != 2 or min(window) < 1:
        raise _NoCase(f"a window of {kind} of shape {window}: expected channels and columns, in either order")
    channels, columns = max(window), min(window) - held.get("more_columns", 0)
    key_heads, rest = divmod(channels - heads * values, 2 * keys)
    if rest or key_heads < 1 or heads % key_heads or columns < 1:
        raise _NoCase(
            f"a window of {channels} channels and {columns} columns does not fit {kind} with {heads} value heads of "
            f"{values} and keys of {keys}"
        )
    return StateShape(keys, columns + 1, dtype), Heads(kind, heads, key_heads), values


def _mode(line: Mapping[str, Any]) -> ForwardMode:
    if line["mode"] == "decode" and line.get("spec"):
        return ForwardMode.DRAFT_DECODE
    if line["mode"] not in MODES:
        raise _NoCase(f"mode {line['mode']}")
    return MODES[line["mode"]]


def _word(what: str, value: str | None, words: Mapping[str, str]) -> str:
    if value is None or value not in words:
        raise _NoCase(f"{what} {value}")
    return words[value]


def _unknown(what: str) -> Any:
    raise _NoCase(f"{what} is not known: the backend was made before recording began")


def _kv_dtype(layer: Mapping[str, Any]) -> str:
    kv = layer.get("kv_dtype")
    return "same" if kv in (None, layer["dtype"]) else _word("KV dtype", kv, KV_DTYPES)


def _of_layers(layers: Sequence[Mapping[str, Any]], differs: list[str]) -> dict[str, Any]:
    first = layers[0]
    shapes = {(*layer["heads"], layer["head_dim"], layer["v_head_dim"]) for layer in layers}
    if len(shapes) > 1:
        differs.append(f"heads: layers have {len(shapes)} shapes, and the case has the first shape")
    windows = [layer["window"] for layer in layers]
    some = sorted({window for window in windows if window >= 0})
    if len(some) > 1:
        differs.append(f"window: layers have {len(some)} windows, and the case has the narrowest")
    caps = sorted({layer["logit_cap"] for layer in layers} - {0.0})
    if len(caps) > 1:
        differs.append(f"soft cap: layers have {len(caps)} soft caps, and the case has the smallest")
    return {
        **_heads(first),
        "window": some[0] if some else -1,
        "layer_windows": ("any" if not some else "one" if min(windows) < 0 else "same"),
        "logit_cap": caps[0] if caps else 0.0,
        "sinks": any(layer["sinks"] for layer in layers),
    }


def _heads(layer: Mapping[str, Any]) -> dict[str, Any]:
    q_heads, kv_heads = layer["heads"]
    head_dim, of_values = layer["head_dim"], layer["v_head_dim"]
    if of_values != head_dim:
        if kv_heads != 1 or of_values > head_dim:
            raise _NoCase(f"values of {of_values} with keys of {head_dim}, and {kv_heads} KV heads")
        return {
            "heads": Heads.of("softmax", q_heads, 1, values_in_keys=True),
            "head_dim": of_values,
            "rope_dim": head_dim - of_values,
        }
    usual = bool(layer["usual_scaling"])
    return {"heads": Heads.of("softmax", q_heads, kv_heads), "head_dim": head_dim, "usual_scaling": usual}


def _rows(mode: ForwardMode, line: Mapping[str, Any], differs: list[str]) -> dict[str, Any]:
    """Keys before the step, and the rows of the requests."""
    lens, new, spec = line.get("seq_lens"), line.get("new_tokens"), line.get("spec", {})
    if mode is ForwardMode.EXTEND:
        if line.get("prefix_lens") is None or new is None:
            raise _NoCase("the host did not know its lengths")
        return {"prefixes": tuple(line["prefix_lens"]), "rows": Extend(tuple(new), room_for(new))}
    if lens is None:
        raise _NoCase("the host did not know its lengths")
    if mode is ForwardMode.DECODE:
        return {"prefixes": _less(lens, 1), "rows": Decode()}
    if mode is ForwardMode.TARGET_VERIFY:
        return {"prefixes": tuple(lens), "rows": Verify(_tree(spec, differs))}
    if mode is ForwardMode.DRAFT_DECODE:
        steps = spec.get("num_steps") or line.get("steps") or _unknown("the number of draft steps")
        draft = Draft(spec.get("topk") or spec.get("num_tokens_per_req") or 1, steps)
        return {"prefixes": tuple(lens), "rows": Drafted(draft)}
    return _draft_extend(mode, line, differs)


def _draft_extend(mode: ForwardMode, line: Mapping[str, Any], differs: list[str]) -> dict[str, Any]:
    lens, new, given = line["seq_lens"], line.get("new_tokens"), line["spec"].get("num_tokens_per_req", 0)
    if mode is ForwardMode.DRAFT_EXTEND_V2:
        width = max(given, *new) if new else given
        if width < 1:
            raise _NoCase("the number of draft tokens is not known")
        differs.append("accepted tokens: only the device has their number, so the case accepts all")
        return {"prefixes": _less(lens, width), "rows": Accepted((width,) * len(lens), width, v2=True)}
    if new is None:
        raise _NoCase("the host did not know its lengths")
    width = max(given, line.get("steps", -1) + 1, *new)
    if given < 1 and "steps" not in line:
        differs.append("rows in the graph: as many as the largest request has")
    prefixes = tuple(max(0, length - count) for length, count in zip(lens, new, strict=True))
    return {"prefixes": prefixes, "rows": Accepted(tuple(new), width)}


def _less(lens: Sequence[int], rows: int) -> tuple[int, ...]:
    return tuple(max(0, length - rows) for length in lens)


def _tree(spec: Mapping[str, Any], differs: list[str]) -> Tree:
    nodes = spec.get("draft_token_num") or spec.get("num_tokens_per_req") or _unknown("the number of draft tokens")
    topk = spec.get("topk") or 1
    if topk == 1:
        return chain(nodes)
    differs.append(
        f"tree: only the device has it, so each node of the case has {topk} children as long as there are nodes"
    )
    return Tree(tuple((node - 1) // topk for node in range(1, nodes)))
