"""Recorder of the calls that one program of a Triton kernel makes while its Python runs.

The kernel's Python gets tensors without numbers: a `Traced` represents a result of the interpreter. It can only be
passed back to the interpreter, whose calls are recorded, or be converted to a number, which is recorded as a decision.
The counter of a loop over a range that a tensor bounds is such a number, too. Any other use of a value fails, and the
kernel runs unrecorded.
"""

from __future__ import annotations

import enum
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuda_on_cpu.triton_bounds import threads_meet
from cuda_on_cpu.triton_lanes import exchanges
from cuda_on_cpu.triton_numbers import PythonNumber, as_tensor, plain
from cuda_on_cpu.triton_paths import Call, Effect, Kind
from cuda_on_cpu.triton_quick import shorter, spreads
from cuda_on_cpu.triton_together import at_once

_NO_ARGUMENT_MAY_BE = "an argument of a kernel, or of a call in it, that is not a number, type or tensor: "
_PURE = re.compile(
    "get_.*|create_("
    "f?(add|sub|mul|div|rem|neg|abs|ma)|[us](div|rem)|idiv|precise_divf|approx_divf|shl|[al]shr|umulhi|iabs|fma|clampf|"
    "(min|max)(si|ui|imumf|numf)|[if]cmp.*|and|or|xor|select|[us]i_to_fp|fp_to_[us]i|fp_ext|fp_trunc|fp_to_fp|int_cast|"
    "bitcast|int_to_ptr|ptr_to_int|addptr|cos|sin|exp|exp2|log|log2|sqrt|precise_sqrt|rsqrt|erf|floor|ceil|reshape|trans|"
    "dot|dot_scaled|make_range|expand_dims|broadcast|cat|join|split|splat|unsplat|make_tensor_descriptor|make_block_ptr|"
    "advance)"
)
_HANDLES = ("TensorHandle", "TensorDescHandle", "BlockPointerHandle")


class Untraceable(Exception):
    """The program cannot be recorded as calls on tensors."""


class Traced:
    """A placeholder for a tensor of a program, or for another result of the interpreter."""

    __slots__ = ("dtype", "slot")

    def __init__(self, slot: int, dtype: Any) -> None:
        self.slot, self.dtype = slot, dtype

    def set_attr(self, *_: Any) -> None:
        """Ignore hints to a compiler."""


class Recorder:
    """Replaces the interpreter's builder and returns the values that the kernel's Python sees. `effects` are those that
    happened already: they are answered from the record, and not done twice.
    """

    def __init__(self, module: Any, arguments: Sequence[Any], effects: Sequence[Effect]) -> None:
        self.path: list[Call] = []
        self.twins: set[Any] = set()
        self.effects = list(effects)
        self._to_repeat = len(effects)
        self._repeated = 0
        self._module, self._builder = module, module.interpreter_builder
        self._answers = answers_of(module)
        self._values = list(arguments)
        self._known: dict[Any, Any] = {}
        self._spread: dict[int, int] = {}
        self._loaded: set[int] = set()
        """Results that depend on a load."""
        self._have_met = True
        """True if threads have met since the last load or store."""

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        if not callable(member):
            return member

        def call(*args: Any, **named: Any) -> Any:
            if named:
                args = by_position(member, args, named)
            if name.startswith("get_") and not any(type(arg) in _UNKNOWN for arg in args):
                found = member(*args)
                if not isinstance(found, self._answers):
                    return found  # a type
            return self.wrapped(self.note(name, _kind(name), member, *args))

        return call

    def note(
        self, name: object, kind: Kind, run: Callable[..., Any], *args: Any, together: Callable[..., Any] | None = None
    ) -> int:
        """Make a call, unless its result is known, and return the number of its result in the path. ``together``: the
        call for several programs."""
        slots = tuple(self.slot(arg) for arg in args)
        if kind is not Kind.EFFECT and (name, slots) in self._known:
            return int(self._known[name, slots])
        self._loaded_by(name, kind, slots)
        if kind is Kind.EFFECT and self._repeated < self._to_repeat:
            value = self._repeat(name)
        else:
            value = run(*[self._values[slot] for slot in slots])
            if kind is Kind.EFFECT:
                self.effects.append((name, value))
        found = self._shorter(name, kind, run, slots, value)
        if together is None:
            operands, made = [self._values[slot] for slot in slots], None if found is None else found[0]
            together = at_once(self._module.TensorHandle, name, run, made, operands, value)
        return self._add(Call(name, slots, kind, run, value, found, together))

    def _loaded_by(self, name: object, kind: Kind, slots: tuple[int, ...]) -> None:
        """Note a result that depends on a load, before it gets its number, and a call in which threads meet."""
        from_load = kind is Kind.EFFECT or not self._loaded.isdisjoint(slots)
        meets = exchanges(name) or (name == "create_expand_dims" and from_load)
        if kind is Kind.EFFECT and not meets:
            self._have_met = False
        elif meets and not self._have_met:
            if self._repeated >= self._to_repeat:  # those before were noted when the effects happened
                threads_meet()
            self._add(Call("threads meet", (), Kind.ORDER, threads_meet, None))
            self._have_met = True
        if from_load:
            self._loaded.add(len(self._values))

    def _shorter(self, name: object, kind: Kind, run: Callable[..., Any], slots: tuple[int, ...], value: Any) -> Any:
        """A shorter way to the value of a call: a function, and the results of the path that it uses."""
        if spreads(name):
            self._spread[len(self._values)] = slots[1 if name == "create_splat" else 0]
        operands = [[slot, self._spread[slot]] if slot in self._spread else [slot] for slot in slots]
        values = [[self._values[slot] for slot in choices] for choices in operands]
        found = shorter(self._module.TensorHandle, name, run, values, value)
        if found is None:
            return None
        return found[0], tuple(choices[i] for choices, i in zip(operands, found[1], strict=False))

    def _repeat(self, name: object) -> Any:
        self._repeated += 1
        return repeated(name, self.effects[self._repeated - 1])

    def _add(self, call: Call) -> int:
        self.path.append(call)
        self._values.append(call.value)
        slot = len(self._values) - 1
        if call.kind not in (Kind.EFFECT, Kind.ORDER):
            self._known[call.name, call.args] = slot
        return slot

    def function_of(self, twin: Any) -> Any:
        """The function of a ``Twin``, on which this recording depends from now on. Raises Untraceable for some."""
        if twin.refusal:
            raise Untraceable(twin.refusal)
        self.twins.add(twin)
        return twin.function

    def value(self, slot: int) -> Any:
        """Value of a result in this program, for code that needs only values that all programs share."""
        return self._values[slot]

    def decide(self, name: str, run: Callable[..., Any], *args: Any) -> Any:
        """Record a number that the kernel's Python sees, on which everything after it depends."""
        slots = tuple(self.slot(arg) for arg in args)
        if (name, slots) not in self._known:
            value = run(*[self._values[slot] for slot in slots])
            self.path.append(Call(name, slots, Kind.DECISION, run, value))
            self._known[name, slots] = value
        return self._known[name, slots]

    def slot(self, arg: Any) -> int:
        """Number of the result of the path that `arg` is; constants are added."""
        if type(arg) in _UNKNOWN:
            return int(arg.slot)
        if isinstance(arg, (list, tuple)) and any(type(item) in _UNKNOWN for item in arg):
            kind = type(arg)
            return self.note(kind.__name__, Kind.PURE, lambda *items: kind(items), *arg)
        name = identity(self._module, arg)
        known = self._known.get((name, ()))
        return self._add(Call(name, (), Kind.INPUT, None, arg)) if known is None else int(known)

    def wrapped(self, slot: int) -> Any:
        """The object that the kernel's Python gets for a result."""
        value = self._values[slot]
        if isinstance(value, tuple):
            return tuple(
                self.wrapped(self.note(f"item {i}", Kind.PURE, operator.itemgetter(i), Traced(slot, None)))
                for i in range(len(value))
            )
        return Traced(slot, getattr(value, "dtype", None)) if isinstance(value, self._answers) else value

    @property
    def tensor(self) -> type:
        """The language's class of tensors."""
        found: type = self._module.tl.core.tensor
        return found

    def tensor_of(self, number: Number) -> Any:
        """The tensor that the language makes from a number."""
        return as_tensor(self._module, number)

    def number(self, slot: int) -> Number:
        """A number that the kernel's Python may compute with, without seeing it."""
        return Number(self, slot, type(self._values[slot]))


def answers_of(module: Any) -> tuple[type, ...]:
    """Types of results of the interpreter's builder that hold values of a program."""
    return (*[getattr(module, name) for name in _HANDLES if hasattr(module, name)], tuple)


def by_position(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call, those given by name in their places. Raises Untraceable if one has no place."""
    bound = inspect.signature(function).bind(*args, **named)
    if bound.kwargs:
        raise Untraceable(f"arguments that are given only by name: {', '.join(bound.kwargs)}")
    return bound.args


def _kind(name: str) -> Kind:
    if name == "create_get_program_id":
        return Kind.PROGRAM
    if name == "create_get_num_programs":
        return Kind.LAUNCH
    return Kind.PURE if _PURE.fullmatch(name) else Kind.EFFECT


def identity(module: Any, value: Any) -> object:
    """Identity of a constant, for comparison with others. Raises Untraceable if it has more than its value."""
    value = plain(value)
    core, kind = module.tl.core, type(value)
    if value is None or kind in (int, bool, str):
        return (kind, value)
    if kind is float:
        return (kind, value.hex())
    if isinstance(value, core.constexpr):
        return (kind, identity(module, value.value))
    if isinstance(value, core.dtype):
        return (kind, str(value))
    if isinstance(value, (list, tuple, core.tuple)):
        return (kind, *[identity(module, item) for item in value])
    if isinstance(value, (enum.Enum, module.InterpretedFunction)) or kind.__module__.startswith("triton._C"):
        return (kind, value)
    raise Untraceable(f"{_NO_ARGUMENT_MAY_BE}{kind.__name__}")


class Number:
    """A number of a program with an unknown value: a comparison with it is a decision. `isinstance` treats it as a
    number, but C code does not, so nothing uses it as a number by accident.
    """

    __slots__ = ("_kind", "_recorder", "slot")

    def __init__(self, recorder: Recorder, slot: int, kind: type) -> None:
        self._recorder, self.slot, self._kind = recorder, slot, kind

    def _class(self) -> type:
        return self._kind

    __class__ = property(_class)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._recorder.tensor, name):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {name!r}")
        return getattr(self._recorder.tensor_of(self), name)

    def _seen(self) -> Any:
        return self._recorder.decide("value", _same, self)

    def __hash__(self) -> int:
        return hash(self._seen())

    def __str__(self) -> str:
        return str(self._seen())

    def __format__(self, form: str) -> str:
        return format(self._seen(), form)


def _same(value: Any) -> Any:
    return value


def _is_plain(other: Any) -> bool:
    return type(other) in (int, float, bool, Number) or isinstance(other, PythonNumber)


def _computed(name: str, swapped: bool) -> Callable[..., Any]:
    run = getattr(operator, name)

    def compute(self: Number, *others: Any) -> Any:
        if not all(map(_is_plain, others)):
            return NotImplemented
        operands = (*others, self) if swapped else (self, *others)
        recorder = self._recorder
        return recorder.number(recorder.note(f"operator {name}", Kind.PURE, run, *operands))

    return compute


def _compared(name: str) -> Callable[..., Any]:
    run = getattr(operator, name)

    def compare(self: Number, other: Any) -> Any:
        if not _is_plain(other):
            return NotImplemented
        return self._recorder.decide(f"operator {name}", run, self, other)

    return compare


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(Number, f"__{_name.rstrip('_')}__", _computed(_name, swapped=False))
    setattr(Number, f"__r{_name.rstrip('_')}__", _computed(_name, swapped=True))
for _name in ("neg", "abs"):
    setattr(Number, f"__{_name}__", _computed(_name, swapped=False))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _compared(_name))
for _name, _convert in (("index", operator.index), ("int", int), ("float", float), ("bool", bool)):
    setattr(Number, f"__{_name}__", lambda self, convert=_convert: convert(self._seen()))


_UNKNOWN = frozenset({Traced, Number})


class Repeater:
    """Replaces the interpreter's builder for a program whose replay was given up: effects that happened are answered
    from the record, and not done twice."""

    def __init__(self, builder: Any, effects: Sequence[Effect]) -> None:
        self._builder, self._effects = builder, list(reversed(effects))

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        if not callable(member):
            return member
        meets, is_effect = exchanges(name) or name == "create_expand_dims", _kind(name) is Kind.EFFECT
        if not (meets or is_effect):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._effects:
                return repeated(name, self._effects.pop()) if is_effect else member(*args, **kwargs)
            if meets:
                threads_meet()
            return member(*args, **kwargs)

        return call


def repeated(name: object, effect: Effect) -> Any:
    """Result of an effect that happened. Raises RuntimeError if it was another one."""
    known, value = effect
    if known != name:
        raise RuntimeError(f"the kernel did {name} where it did {known} a moment ago")
    return value
