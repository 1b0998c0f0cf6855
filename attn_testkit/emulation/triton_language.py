"""`triton.language` for a program that is noted down: where the interpreter looks at numbers, it asks the recorder.

Nothing here changes what the language does outside a recording.
"""

from __future__ import annotations

import contextlib
import dis
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from attn_testkit.emulation import triton_speed
from attn_testkit.emulation.triton_paths import Kind
from attn_testkit.emulation.triton_record import Number, Recorder, Traced, Untraceable, identity

Replacement = tuple[Any, str, Any]
_MISSING = object()
_OUTSIDE = ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR")
_SEEN_OUTSIDE = frozenset(
    {
        "print",
        "input",
        "open",
        "breakpoint",
        "exec",
        "eval",
        "globals",
        "vars",
        "setattr",
        "delattr",
        "__import__",
        "id",
    }
)
"""Functions of Python that a program walked along a path would not call."""
_COMBINATIONS = (
    "_sum_combine",
    "_prod_combine",
    "_elementwise_max",
    "_elementwise_min",
    "_argmax_combine_tie_break_left",
    "_argmax_combine_tie_break_fast",
    "_argmin_combine_tie_break_left",
    "_argmin_combine_tie_break_fast",
)


def recorder_of(module: Any) -> Recorder | None:
    """Who notes down what runs in the interpreter now, if anybody does."""
    builder = module.interpreter_semantic.builder
    return builder if type(builder) is Recorder else None


@contextlib.contextmanager
def builder_is(module: Any, builder: Any) -> Iterator[None]:
    """Let the language hand its calls to `builder`."""
    semantic = module.interpreter_semantic
    before, semantic.builder = semantic.builder, builder
    try:
        yield
    finally:
        semantic.builder = before


class _CurrentBuilder:
    """Whichever builder the language hands its calls to now."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module.interpreter_semantic.builder, name)


@contextlib.contextmanager
def patched(module: Any) -> Iterator[None]:
    """The language as the interpreter patches it for a launch, good for recordings too."""
    own = module.interpreter_builder
    module.interpreter_builder = _CurrentBuilder(module)  # Triton 3.6 gives every call the builder that it finds here
    try:
        scope = triton_speed.patch_language(module)
    finally:
        module.interpreter_builder = own
    new = _replacements(module)
    replaced = [(owner, name, vars(owner)[name]) for owner, name, _ in new]
    try:
        for owner, name, value in new:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        scope.restore()


def _replacements(module: Any) -> list[Replacement]:
    """For the language as the interpreter patched it."""
    tensor, core = module.tl.core.tensor, module.tl.core
    return [
        (tensor, "__bool__", _seen_as(module, tensor.__bool__, "bool", _as_bool)),
        (tensor, "__index__", _seen_as(module, tensor.__index__, "int", _as_int)),
        (tensor, "__repr__", _unseen(tensor.__repr__)),
        (tensor, "__str__", _unseen(tensor.__str__)),
        (tensor, "T", property(_transposed_of(module, vars(tensor)["T"].fget))),
        (module.tl, "range", _range_of(module, module.tl.range)),
        (core, "range", _range_of(module, core.range)),
        (module.tl, "static_print", _print_of(module, module.tl.static_print)),
        *_dependent_launches(module),
    ]


def _dependent_launches(module: Any) -> list[Replacement]:
    """What kernels that may begin before the one ahead has ended say to the device: here each begins when it has."""
    cuda = module.tl.extra.cuda
    return [(cuda, name, lambda: None) for name in ("gdc_wait", "gdc_launch_dependents") if hasattr(cuda, name)]


def _as_bool(handle: Any) -> bool:
    """What the interpreter takes a tensor for: only one of one element can be false."""
    return bool(handle.data) if handle.data.size == 1 else True


def _as_int(handle: Any) -> int:
    return int(np.squeeze(handle.data))


def _seen_as(module: Any, stock: Callable[..., Any], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def see(self: Any) -> Any:
        recorder = recorder_of(module)
        if recorder is None or type(self.handle) is not Traced:
            return stock(self)
        return recorder.decide(name, run, self.handle)

    return see


def _unseen(stock: Callable[..., Any]) -> Callable[..., Any]:
    def show(self: Any) -> Any:
        if type(self.handle) is Traced:
            raise Untraceable("the numbers of a tensor are written out")
        return stock(self)

    return show


def _transposed_of(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    core, handle = module.tl.core, module.TensorHandle

    def run(value: Any) -> Any:
        return handle(np.transpose(value.data), value.dtype)

    def transposed(self: Any) -> Any:
        recorder = recorder_of(module)
        if recorder is None:
            return stock(self)
        *outer, rows, columns = self.type.shape
        found = recorder.wrapped(recorder.note("T", Kind.PURE, run, self.handle))
        return core.tensor(found, core.block_type(self.dtype, [*outer, columns, rows]))

    return transposed


def _print_of(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    def static_print(*args: Any, **kwargs: Any) -> None:
        if recorder_of(module) is not None:
            raise Untraceable("Python prints for every program")
        stock(*args, **kwargs)

    return static_print


def _range_of(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    tensor, constexpr = module.tl.core.tensor, module.tl.core.constexpr

    def part(recorder: Recorder, value: Any) -> Any:
        if isinstance(value, tensor):
            return recorder.number(recorder.note("number", Kind.PURE, _as_int, value.handle))
        return value.value if isinstance(value, constexpr) else value

    def traced_range(*args: Any, **options: Any) -> Any:
        recorder = recorder_of(module)
        parts = args if recorder is None else [part(recorder, arg) for arg in args]
        if not any(type(value) is Number for value in parts):
            return stock(*args, **options)
        step = options.get("step", 1)
        start, stop, step = (0, parts[0], step) if len(parts) == 1 else (*parts, step)[:3]
        return _counted(start, stop, operator.index(step))

    return traced_range


def _counted(start: Any, stop: Any, step: int) -> Iterator[Any]:
    """`range` of numbers that are not known: whether there is a next one is a decision."""
    if step == 0:
        raise ValueError("range() arg 3 must not be zero")
    while start < stop if step > 0 else start > stop:
        yield start
        start = start + step


class Twin:
    """A function of a kernel with a `range` that may be noted down, good as long as what it names stays the same."""

    def __init__(self, module: Any, function: types.FunctionType) -> None:
        named, attributes = _named_in(function.__code__)
        self._namespaces = [(function.__globals__, name) for name in named & function.__globals__.keys()]
        for value in [namespace[name] for namespace, name in self._namespaces]:
            if isinstance(value, types.ModuleType) and not _is_of_triton(value.__name__):
                self._namespaces += [(vars(value), name) for name in attributes & vars(value).keys()]
        self._values = [namespace[name] for namespace, name in self._namespaces]
        for value in self._values:
            _refuse_what_changes(module, value)
        if function.__closure__ or (named & _SEEN_OUTSIDE) - function.__globals__.keys():
            raise Untraceable("a kernel that does more than to compute")
        names = {"range": _range_of(module, range), **function.__globals__}
        self.function = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        self.function.__kwdefaults__ = function.__kwdefaults__

    def is_current(self) -> bool:
        """Whether the function would still find the same behind every name."""
        places = zip(self._namespaces, self._values, strict=True)
        return all(namespace.get(name, _MISSING) is value for (namespace, name), value in places)


def _named_in(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Names that are looked up outside a function, and those of attributes. Raises Untraceable if it changes any."""
    named, attributes = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            named.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(step.argval)
        elif step.opname in _OUTSIDE:
            raise Untraceable(f"a kernel's Python does more than to compute: {step.opname}")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            more = _named_in(constant)
            named, attributes = named | more[0], attributes | more[1]
    return named, attributes


def _is_of_triton(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "triton"


def _refuse_what_changes(module: Any, value: Any) -> None:
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
        return
    described = value if isinstance(value, (type, types.FunctionType)) else type(value)
    if not _is_of_triton(described.__module__):
        identity(module, value)


class Twins:
    """The twins of the functions of one interpreter."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._known: weakref.WeakKeyDictionary[Any, Twin] = weakref.WeakKeyDictionary()

    def of(self, function: Any) -> Twin:
        """A twin that is current. Raises Untraceable if the function names something that may change."""
        twin = self._known.get(function)
        if twin is None or not twin.is_current():
            twin = self._known[function] = Twin(self._module, function)
        return twin


def replacements(module: Any, twins: Twins) -> list[Replacement]:
    """(object, attribute, replacement) for what a kernel calls beside the interpreter's builder."""
    function, reductions = module.InterpretedFunction, module.ReduceScanOpInterface
    return [
        (function, "__call__", _nested_call_of(module, triton_speed.nested_call_of(module), twins)),
        (reductions, "apply", _apply_of(module, reductions.apply)),
    ]


def _nested_call_of(module: Any, stock: Callable[..., Any], twins: Twins) -> Callable[..., Any]:
    def nested_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = recorder_of(module)
        if recorder is None:
            return stock(self, *args, **kwargs)
        try:
            return recorder.function_of(twins.of(self.rewrite()))(*args, **kwargs)
        except Exception as failure:
            raise module.InterpreterError(repr(failure)) from failure

    return nested_call


def _apply_of(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    core, standard = module.tl.core, module.tl.standard
    known = [getattr(standard, name, None) for name in _COMBINATIONS]

    def apply(self: Any, input: Any) -> Any:
        recorder = recorder_of(module)
        if recorder is None or not isinstance(input, tuple):
            return stock(self, input)
        if not any(self.combine_fn is one for one in known):
            raise Untraceable("a reduction by a function of the kernel's own")
        kinds = [tensor.type for tensor in input]

        def run(*handles: Any) -> Any:
            return stock(self, tuple(core.tensor(*pair) for pair in zip(handles, kinds, strict=True)))

        options = [(key, value) for key, value in vars(self).items() if key != "combine_fn"]
        name = (type(self).__name__, self.combine_fn.fn.__name__, *options, *map(str, kinds))
        slot = recorder.note(name, Kind.PURE, run, *[tensor.handle for tensor in input])
        return tuple(
            core.tensor(
                recorder.wrapped(recorder.note(f"handle {i}", Kind.PURE, _handle_of(i), Traced(slot, None))), found.type
            )
            for i, found in enumerate(recorder.value(slot))
        )

    return apply


def _handle_of(index: int) -> Callable[..., Any]:
    return lambda tensors: tensors[index].handle
