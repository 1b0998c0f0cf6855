"""Names that a kernel's Python looks up and that the interpreter leaves unpatched.

The interpreter replaces attributes of `triton.language`. If a module holds such a function under another name (`exp =
tl.exp`), the compiler's function remains there, and counters of `range` are Python integers, not tensors. A `Twin` is a
copy of a function in which both are replaced; the interpreter's arithmetic is unchanged.
"""

from __future__ import annotations

import dis
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cuda_on_cpu.errors import EmulationError
from cuda_on_cpu.sites import author_site
from cuda_on_cpu.triton_bounds import refuse_undefined_rounds
from cuda_on_cpu.triton_numbers import python_number
from cuda_on_cpu.triton_paths import Kind
from cuda_on_cpu.triton_record import Number, Recorder, Untraceable, identity

_MISSING = object()
_OUTSIDE = ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR")
_CHANGES_NAMES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_SEES_NAMES = frozenset({"exec", "eval", "globals"})
_SEEN_OUTSIDE = _SEES_NAMES | {
    "print",
    "input",
    "open",
    "breakpoint",
    "vars",
    "setattr",
    "delattr",
    "__import__",
    "id",
}
"""Functions of Python that a program replayed along a path would not call."""
_COUNTERS = ("range", "static_range")
_EXTRA = "triton.language.extra"
_OF_DEVICE = {
    **{
        name: name
        for name in ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "rsqrt", "abs", "floor", "ceil", "erf", "fma")
    },
    **{f"fast_{name}f": name for name in ("exp", "log", "log2", "sin", "cos")},
    "fabs": "abs",
    "fast_dividef": "fdiv",
}
"""Functions of NVIDIA's library for the device, and those of the language that compute the same."""


def recorder_of(module: Any) -> Recorder | None:
    """The recorder of the code that the interpreter runs now, or None."""
    builder = module.interpreter_semantic.builder
    return builder if type(builder) is Recorder else None


def as_int(handle: Any) -> int:
    """The number of a tensor of one element. Raises EmulationError for an end of a loop that no load defined."""
    return refuse_undefined_rounds(int(np.squeeze(handle.data)))


def range_of(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Python's `range`, whose counters are numbers that a kernel may use as tensors."""
    number = python_number(module)

    def counted_range(*args: Any, **ignored: Any) -> Any:
        # Triton's compiler takes keywords of Python's range and ignores them: FlagGems' kernels write
        # range(n, warp_specialize=True).
        parts = _parts(module, args)
        if not any(type(value) is Number for value in parts):
            return map(number, stock(*args))
        start, stop, step = (0, parts[0], 1) if len(parts) == 1 else (*parts, 1)[:3]
        return _counted(number(start), stop, operator.index(step))

    return counted_range


def language_range_of(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's `tl.range`, with such counters."""
    counted_range = range_of(module, range)

    def traced_range(arg1: Any, arg2: Any = None, step: Any = None, **kwargs: Any) -> Any:
        if not all(map(_counts, (arg1, arg2, step))):
            return stock(arg1, arg2, step, **kwargs)
        limits = (0, arg1) if arg2 is None else (arg1, arg2)
        return counted_range(*limits, 1 if step is None else step)

    def _counts(value: Any) -> bool:
        return value is None or isinstance(value, (int, Number, module.tl.core.tensor, module.tl.core.constexpr))

    return traced_range


def _parts(module: Any, args: tuple[Any, ...]) -> list[Any]:
    """The limits of a loop; those that are tensors are recorded as unknown numbers."""
    recorder = recorder_of(module)
    if recorder is None:
        return list(args)
    tensor, constexpr = module.tl.core.tensor, module.tl.core.constexpr

    def part(value: Any) -> Any:
        if isinstance(value, tensor):
            return recorder.number(recorder.note("number", Kind.PURE, as_int, value.handle))
        return value.value if isinstance(value, constexpr) else value

    return [part(arg) for arg in args]


def _counted(start: Any, stop: Any, step: int) -> Iterator[Any]:
    """`range` of unknown numbers: the end of the loop is a decision."""
    if step == 0:
        raise ValueError("range() arg 3 must not be zero")
    while start < stop if step > 0 else start > stop:
        yield start
        start = start + step


class Language:
    """The functions of `triton.language` that the interpreter replaces, by the functions that a module may hold."""

    def __init__(self, module: Any) -> None:
        self._module = module
        language = module.tl
        owners = (language, language.core, language.math, language.extra.cuda)
        self._places: dict[int, tuple[Any, str, Any]] = {}
        for owner in owners:
            for name, value in vars(owner).items():
                if name in _COUNTERS or language.core.is_builtin(value):
                    self._places.setdefault(id(value), (owner, name, value))

    def instead_of(self, value: Any) -> Any:
        """Function that a kernel calls instead of its module's ``value``; None if it may call ``value``."""
        if isinstance(value, types.FunctionType) and value.__module__.endswith(".libdevice"):
            return self._of_device(value.__name__)
        place = self._places.get(id(value))
        if place is not None:
            owner, name, _ = place
            return lambda *args, **named: getattr(owner, name)(*args, **named)
        if not (isinstance(value, types.FunctionType) and self._module.tl.core.is_builtin(value)):
            return None
        # One of an extra module, or what an earlier launch outside the emulation replaced, as Triton 3.6 leaves it.
        return lambda *args, **named: value(*args, **{**named, "_semantic": self._module.interpreter_semantic})

    def _of_device(self, name: str) -> Callable[..., Any]:
        language, own = self._module.tl, _OF_DEVICE.get(name)

        def call(*args: Any, **named: Any) -> Any:
            if own is not None:
                return getattr(language, own)(*args, **named)
            raise EmulationError(
                f"libdevice.{name} in a triton kernel",
                author_site(),
                "it is NVIDIA's code for its GPUs, which Triton's interpreter does not have: it cannot run without one",
                "use a function of triton.language where one computes the same, or run on a GPU",
            )

        return call


class Twin:
    """A copy of a kernel's function with replaced names, valid while the values of its names stay the same.

    `refusal` is the reason why it cannot be recorded; empty if it can.
    """

    def __init__(self, module: Any, language: Language, function: types.FunctionType) -> None:
        code, given = function.__code__, function.__globals__
        named, attributes, does = _named_in(code)
        self._namespaces = [(given, name) for name in named]
        own: dict[str, Any] = {}
        for name in named & given.keys():
            value = given[name]
            instead = language.instead_of(value)
            if type(value) is module.tl.core.constexpr and "value" not in attributes:
                # The compiler adds a constant of the module to a tensor; `constexpr.__add__` knows numbers only.
                instead = value.value
            if isinstance(value, types.ModuleType) and _may_hold(value.__name__):
                held = attributes & vars(value).keys()
                self._namespaces += [(vars(value), attribute) for attribute in held]
                inside = {attribute: language.instead_of(vars(value)[attribute]) for attribute in held}
                known = {attribute: found for attribute, found in inside.items() if found is not None}
                instead = types.SimpleNamespace(**{**vars(value), **known}) if known else None
            if instead is not None:
                own[name] = instead
        self._values = [namespace.get(name, _MISSING) for namespace, name in self._namespaces]
        self.refusal = self._refusal(module, function, does, named - given.keys())
        self.function = function
        if not (does & _CHANGES_NAMES or named & _SEES_NAMES):
            names = {"range": range_of(module, range), **given, **own}
            self.function = types.FunctionType(
                code, names, function.__name__, function.__defaults__, function.__closure__
            )
            self.function.__kwdefaults__ = function.__kwdefaults__

    def _refusal(self, module: Any, function: types.FunctionType, does: set[str], python: set[str]) -> str:
        outside = sorted(does.intersection(_OUTSIDE))
        if outside:
            return f"a kernel's Python does more than to compute: {outside[0]}"
        if function.__closure__ or python & _SEEN_OUTSIDE:
            return "a kernel that does more than to compute"
        try:
            for value in self._values:
                if value is not _MISSING:  # a name of Python's own, or one that comes later
                    _refuse_what_changes(module, value)
        except Untraceable as reason:
            return str(reason)
        return ""

    def is_current(self) -> bool:
        """True if every name of the function still has the same value."""
        places = zip(self._namespaces, self._values, strict=True)
        return all(namespace.get(name, _MISSING) is value for (namespace, name), value in places)


def _named_in(code: types.CodeType) -> tuple[set[str], set[str], set[str]]:
    """Names that a function looks up outside itself, names of attributes, and the kinds of its instructions."""
    named: set[str] = set()
    attributes: set[str] = set()
    does: set[str] = set()
    for step in dis.get_instructions(code):
        does.add(step.opname)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            named.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            more = _named_in(constant)
            named, attributes, does = named | more[0], attributes | more[1], does | more[2]
    return named, attributes, does


def _may_hold(module: str) -> bool:
    """True if functions of a module have to be inspected: the interpreter replaces those of the language itself."""
    return not _is_of_triton(module) or module.startswith(_EXTRA)


def _is_of_triton(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "triton"


def _refuse_what_changes(module: Any, value: Any) -> None:
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
        return
    described = value if isinstance(value, (type, types.FunctionType)) else type(value)
    if not _is_of_triton(described.__module__):
        identity(module, value)


class Twins:
    """Copies (``Twin``) of the functions of one interpreter."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._language = Language(module)
        self._known: weakref.WeakKeyDictionary[Any, Twin] = weakref.WeakKeyDictionary()

    def of(self, function: Any) -> Twin:
        """An up-to-date ``Twin`` of a function."""
        twin = self._known.get(function)
        if twin is None or not twin.is_current():
            twin = self._known[function] = Twin(self._module, self._language, function)
        return twin
