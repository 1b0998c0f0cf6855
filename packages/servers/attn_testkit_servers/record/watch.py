"""Recorder of a running server's calls to its attention backend: shapes, lengths, hooks and flags, no data.

It imports only the standard library, no other file of the kit and not torch, so a server's process can load it by its
path. An error in it ends the record with one warning, and never the server. It does not wait for the device, unless
``ATTN_TESTKIT_RECORD_WAITS`` is set: it records the lengths that the host has.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

VARIABLE = "ATTN_TESTKIT_RECORD"
"""Environment variable with the file to append to. Without it nothing is recorded."""
WAITS = "ATTN_TESTKIT_RECORD_WAITS"
"""Environment variable that allows a copy of lengths that only the device has, for recorded lines."""
MOST_LINES = 2_000
"""Most lines of a process."""
Class = TypeVar("Class", bound=type)

_PLANS = ("init_forward_metadata", "init_forward_metadata_out_graph")
_OLDER_PLANS = ("init_forward_metadata_capture_cuda_graph", "init_forward_metadata_replay_cuda_graph")
_COMMITS = ("update_mamba_state_after_mtp_verify", "commit")
_BUILDS = ("build", "build_for_cudagraph_capture")
"""Hooks of vLLM's metadata builders."""
_HOOKS = ("__init__", *_PLANS, *_OLDER_PLANS, "forward", *_COMMITS, *_BUILDS)
_ABOUT = "_attn_testkit_record"
"""Attribute of a recorded instance: arguments of its constructor, and its number."""


class _Record:
    """The file of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._shapes: Counter[str] = Counter()
        self._over = False
        self.layers: set[tuple[int, int, bool]] = set()
        """Calls of layers that are in the file: object, layer, True if k and v are stored."""
        self.instances = itertools.count()
        self.inside = threading.local()

    def wants(self, shape: str) -> bool:
        """True if the next batch of a shape has to be written. A server decodes for days, and batches of one shape
        differ only in lengths: the 1st, 2nd, 4th, 8th, ... of a shape are written.
        """
        with self._lock:
            self._shapes[shape] += 1
            count = self._shapes[shape]
            return not self._over and count & (count - 1) == 0

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line, unless it is there already."""
        text = json.dumps({**line, "process": os.getpid()}, separators=(",", ":"))
        with self._lock:
            if self._over or text in self._seen:
                return
            self._seen.add(text)
            self._over = len(self._seen) >= MOST_LINES
            # One write of a file that is open for appending: lines of several processes do not mix.
            file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, text.encode() + b"\n")
            finally:
                os.close(file)

    def forked(self) -> None:
        """Reset the record in a child process: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self.inside = threading.local()
        self.layers.clear()

    def end(self, error: Exception) -> None:
        """Stop recording, and print one warning."""
        if not self._over:
            self._over = True
            print(
                f"attn-testkit: recording ended, the server goes on: {type(error).__name__}: {error}", file=sys.stderr
            )


_record = _Record()
os.register_at_fork(after_in_child=_record.forked)


def watch(backend: Class) -> Class:
    """Record the calls of a backend class. Returns the class, so it works as a decorator.

    Nothing is changed unless the environment names a file in ``ATTN_TESTKIT_RECORD``.
    """
    if os.environ.get(VARIABLE):
        for name in _HOOKS:
            found = getattr(backend, name, None)
            if inspect.isfunction(found) and not hasattr(found, _ABOUT):
                setattr(backend, name, _watched(name, found))
    return backend


def watch_subclasses(base: type) -> None:
    """Record the calls of a base class and of all classes derived from it from now on."""
    own = base.__dict__.get("__init_subclass__")

    def begin(cls: Any, /, **given: Any) -> None:
        if own is None:
            # As a class method that base does not define: its parents' own.
            super(base, cls).__init_subclass__(**given)  # type: ignore[arg-type]
        else:
            own.__func__(cls, **given)
        for name in _HOOKS:
            if inspect.isfunction(cls.__dict__.get(name)):
                setattr(cls, name, _watched(name, cls.__dict__[name]))

    watch(base)
    base.__init_subclass__ = classmethod(begin)  # type: ignore[assignment]


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        # A hook calls others, of its parents and of backends that it wraps: the outermost is what the server called.
        if name == "__init__":
            # Of a class and its parents the outermost comes first.
            if _ABOUT not in getattr(self, "__dict__", ()):
                _write(name, signature, self, args, given)
            return method(self, *args, **given)
        if getattr(_record.inside, "hook", None) is not None or (name == "forward" and _is_known(self, args, given)):
            return method(self, *args, **given)
        _record.inside.hook = name
        try:
            _write(name, signature, self, args, given)
            return method(self, *args, **given)
        finally:
            _record.inside.hook = None

    setattr(call, _ABOUT, True)
    return call


def _is_known(self: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    """True if this layer was called like this before. It has to be quick: every layer of every eager step calls it."""
    layer = args[3] if len(args) > 3 else given.get("layer")
    stored = args[5] if len(args) > 5 else given.get("save_kv_cache", True)
    key = (id(self), id(layer), bool(stored))
    if key in _record.layers:
        return True
    if len(_record.layers) < MOST_LINES:
        _record.layers.add(key)
    return False


def _write(name: str, signature: inspect.Signature, self: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Write a call before the hook runs, so that the file has it if the hook crashes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = signature.bind(self, *args, **given)
            values.apply_defaults()
            _WRITERS[name](name, self, _named(values.arguments))
    except Exception as error:  # the server's own call comes next, and says what is wrong with its arguments
        _record.end(error)


def _named(arguments: Mapping[str, Any]) -> SimpleNamespace:
    """Arguments by name, including ``**kwargs``; and by position, for names that differ."""
    flat: dict[str, Any] = {}
    for value in arguments.values():
        flat |= value if isinstance(value, dict) else {}
    flat |= arguments
    return SimpleNamespace(by_name=flat, places=list(arguments.values())[1:])


def _constructed(name: str, self: Any, call: SimpleNamespace) -> None:
    about: dict[str, Any] = {"backend": type(self).__name__, "instance": next(_record.instances)}
    server = call.places[0] if call.places else None
    pool = getattr(server, "kv_pool", None) or getattr(server, "token_to_kv_pool", None)
    dtype = getattr(server, "kv_cache_dtype", None) or getattr(pool, "dtype", None)
    steps = (server, "speculative_num_steps"), (getattr(server, "server_args", None), "speculative_num_steps")
    known = {
        "page_size": _number(getattr(server, "page_size", None)),
        "kv_dtype": _dtype(dtype),
        "steps": _first(_number(getattr(owner, name, None)) or None for owner, name in steps),
    }
    self.__dict__[_ABOUT] = about | {key: value for key, value in known.items() if value is not None}


def _about(self: Any) -> dict[str, Any]:
    if _ABOUT not in self.__dict__:
        # Made before it was watched, or by a constructor that failed to be read.
        self.__dict__[_ABOUT] = {"backend": type(self).__name__, "instance": next(_record.instances)}
    return dict(self.__dict__[_ABOUT])


def _planned(name: str, self: Any, call: SimpleNamespace) -> None:
    in_capture = bool(call.by_name.get("in_capture")) or _capturing()
    eager = name == "init_forward_metadata"
    _batch_line(self, call.places[0], name, "eager" if eager else "capture" if in_capture else "replay")


def _planned_as_before(name: str, self: Any, call: SimpleNamespace) -> None:
    batch = SimpleNamespace(**call.by_name, batch_size=call.by_name["bs"])
    _batch_line(self, batch, name, "capture" if name == _OLDER_PLANS[0] else "replay")


def _batch_line(self: Any, batch: Any, hook: str, how: str) -> None:
    size, padding = int(batch.batch_size), _number(getattr(batch, "num_padding", None)) or 0
    spec = getattr(batch, "spec_info", None)
    mode = str(batch.forward_mode.name).lower().replace("_", "-")
    line: dict[str, Any] = {
        "line": "batch", **_about(self), "hook": hook, "how": how, "mode": mode,
        "requests": size - padding, "padded_to": size,
    }  # fmt: skip
    if spec is not None:
        names = ("topk", "spec_steps", "num_steps", "draft_token_num", "num_tokens_per_req")
        line["spec"] = {name: value for name in names if (value := _number(getattr(spec, name, None))) is not None}
        line["spec"]["kind"] = type(spec).__name__
    states = _states_of(self, batch)
    if states is not None:
        line["state"] = states
    if not _record.wants(json.dumps(line)):
        return
    if states is not None and how != "capture" and os.environ.get(WAITS):
        slots = _lens(_slots_of(self, batch), size - padding)
        line["state"] = states if slots is None else {**states, "slots": slots}
    if how != "capture":
        # While a graph is captured lengths are fill values, and copying them would be another fault.
        counts = (spec, "num_accept_tokens_cpu"), (spec, "extend_seq_lens_cpu")
        places = {
            "seq_lens": ((batch, "seq_lens_cpu"), (batch, "seq_lens")),
            "prefix_lens": ((batch, "extend_prefix_lens_cpu"), (batch, "extend_prefix_lens")),
            "new_tokens": ((batch, "extend_seq_lens_cpu"), *counts, (spec, "num_accept_tokens")),
        }
        for key, fields in places.items():
            lens = _first(_lens(getattr(owner, name, None), size - padding) for owner, name in fields)
            if lens is not None:
                line[key] = lens
    _record.write(line)


def _states_of(self: Any, batch: Any) -> dict[str, Any] | None:
    """Kind, shapes, dtypes and conventions of the states that a backend keeps; None if it keeps no states."""
    own, given = getattr(getattr(self, "context", None), "state", None), getattr(batch, "state", None)
    if own is not None:
        first, pool = own.layers[0], own.pool
        window, state = pool.conv(first.layer_id), pool.temporal(first.layer_id)
        state = state if pool.order == "vk" else state.mT
        return {
            **_state_shapes(first.kind, window.shape[1:], state.shape[1:], window.dtype, state.dtype),
            "padding": own.padding, "rollback": own.rollback, "more_columns": pool.more_columns,
            "order": pool.order, "copies": own.snapshots,
            "has_prefix_states": getattr(given, "sources", None) is not None,
        }  # fmt: skip
    linear = getattr(self, "linear_attn_backend", self)
    if not any(each.__name__ == "MambaAttnBackendBase" for each in type(linear).__mro__):
        return None
    try:
        held = linear.req_to_token_pool.mamba_pool.mamba_cache
        window, state = held.conv[0], held.temporal
    except (AttributeError, IndexError) as error:
        return {"kind": type(linear).__name__, "unreadable": str(error)}
    return {
        **_state_shapes(type(linear).__name__, window.shape[2:], state.shape[2:], window.dtype, state.dtype),
        "padding": "skip_minus_one", "rollback": "commit",
        "copies": 64 if getattr(batch, "mamba_track_mask", None) is not None else 0,
    }  # fmt: skip


def _state_shapes(kind: str, window: Any, state: Any, window_dtype: Any, dtype: Any) -> dict[str, Any]:
    return {
        "kind": kind, "window": [int(size) for size in window], "shape": [int(size) for size in state],
        "window_dtype": _dtype(window_dtype), "dtype": _dtype(dtype),
    }  # fmt: skip


def _slots_of(self: Any, batch: Any) -> Any:
    """Slots of the states of a batch's requests."""
    pool = getattr(getattr(self, "linear_attn_backend", self), "req_to_token_pool", None)
    return batch.state.indices if pool is None else pool.req_index_to_mamba_index_mapping[batch.req_pool_indices]


def _committed(name: str, self: Any, call: SimpleNamespace) -> None:
    """A commit of accepted states: the number of the last accepted node of each draft, if the host knows it."""
    line = {"line": "commit", **_about(self), "hook": name, "requests": int(call.places[0].shape[0])}
    if _record.wants(json.dumps(line)):
        known = _lens(call.places[0], line["requests"])
        _record.write(line if known is None else {**line, "steps": known})


def _built(name: str, self: Any, call: SimpleNamespace) -> None:
    """A batch of a metadata builder of vLLM, whose layers keep a state. A build for a capture has fill values."""
    spec: Any = getattr(self, "kv_cache_spec", None)
    if name != _BUILDS[0] or not hasattr(spec, "mamba_type"):
        return
    batch, drafts = call.by_name["common_attn_metadata"], call.by_name.get("num_decode_draft_tokens_cpu")
    starts = _lens(batch.query_start_loc_cpu, int(batch.num_reqs) + 1) or [0]
    new = [after - before for before, after in itertools.pairwise(starts) if after > before]
    bound = getattr(batch, "seq_lens_cpu_upper_bound", None)
    known = _lens(batch.seq_lens, len(new)) if bound is None else None
    lens, asked = known or _lens(bound, len(new)), _lens(drafts, len(new)) if drafts is not None else None
    verifies = bool(new) and asked is not None and min(asked) >= 0 and len(set(new)) == 1
    before = None if lens is None else [length - count for length, count in zip(lens, new, strict=True)]
    decodes = set(new) == {1} and (before is None or min(before) > 0)
    window, state = (next((shape for shape in spec.shapes if len(shape) == count), ()) for count in (2, 3))
    kind = str(getattr(spec.mamba_type, "name", spec.mamba_type))
    line: dict[str, Any] = {
        "line": "batch", **_about(self), "hook": name, "how": "capture" if _capturing() else "eager",
        "mode": "target-verify" if verifies else "decode" if decodes else "extend",
        "requests": len(new), "padded_to": int(batch.num_reqs),
        "state": {
            **_state_shapes(kind, window, state, spec.dtypes[0], spec.dtypes[-1]),
            "padding": "skip_zero", "rollback": "slots",
            "more_columns": int(getattr(spec, "num_speculative_blocks", 0)), "copies": 0,
        },
        "bounds": known is None and (verifies or decodes),
    }  # fmt: skip
    if verifies:
        line["spec"] = {"draft_token_num": new[0], "kind": "drafts"}
    if not _record.wants(json.dumps(line)):
        return
    line["new_tokens"] = new
    if before is not None:
        line |= {"prefix_lens": before, "seq_lens": before if verifies else lens}
    accepted = _lens(call.by_name.get("num_accepted_tokens"), len(new))
    _record.write(line if accepted is None else {**line, "accepted": accepted})


def _keeps_state(self: Any, layer: Any) -> bool:
    """True for a layer with a recurrent state, in SGLang's hybrid wrapper, in the backend that it calls, and in the
    kit."""
    softmax = getattr(self, "full_attn_layers", None)
    if softmax is not None and layer is not None:
        return layer.layer_id not in softmax
    return not hasattr(layer, "tp_q_head_num") or hasattr(layer, "A_log")


def _forwarded(name: str, self: Any, call: SimpleNamespace) -> None:
    q, layer = call.places[0], call.by_name.get("layer")
    if _keeps_state(self, layer):
        return  # what its case needs is in the lines of batches
    sinks = call.by_name.get("sinks")
    about = _about(self)
    head_dim = _number(getattr(layer, "qk_head_dim", None)) or _number(layer.head_dim)
    scaling = getattr(layer, "scaling", None)
    window = _number(getattr(layer, "sliding_window_size", None))
    _record.write({
        "line": "layer", **about, "layer": _number(layer.layer_id),
        "heads": [_number(layer.tp_q_head_num), _number(layer.tp_k_head_num)],
        "head_dim": head_dim, "v_head_dim": _number(getattr(layer, "v_head_dim", None)) or head_dim,
        "dtype": _dtype(q.dtype), "window": -1 if window is None else window,
        "logit_cap": float(getattr(layer, "logit_cap", None) or 0.0),
        "usual_scaling": isinstance(scaling, float) and abs(scaling * float(head_dim or 1) ** 0.5 - 1) < 1e-5,
        "sinks": sinks is not None or getattr(layer, "sinks", None) is not None,
        "save_kv_cache": bool(call.by_name.get("save_kv_cache", True)),
    })  # fmt: skip


_Writer = Callable[[str, Any, SimpleNamespace], None]
_WRITERS: Mapping[str, _Writer] = {
    "__init__": _constructed,
    **dict.fromkeys(_PLANS, _planned),
    **dict.fromkeys(_OLDER_PLANS, _planned_as_before),
    "forward": _forwarded,
    **dict.fromkeys(_COMMITS, _committed),
    **dict.fromkeys(_BUILDS, _built),
}


def _lens(values: Any, count: int) -> list[int] | None:
    """Numbers of a list or of a tensor on the host; None for one on the device, unless the record may wait for it."""
    if isinstance(values, (list, tuple)):
        return [int(value) for value in values[:count]]
    where = getattr(getattr(values, "device", None), "type", None)
    if where is None or (where != "cpu" and not os.environ.get(WAITS)):
        return None
    return [int(value) for value in values[:count].tolist()]


def _first(values: Iterable[Any]) -> Any:
    """The first value that is known."""
    return next((value for value in values if value is not None), None)


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def _dtype(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _capturing() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
