"""Launches under the interpreter without running the kernel's Python for every program of the grid.

The first programs of a kernel are recorded (`triton_record.py`); programs that behave like earlier ones are replayed
along the recorded paths (`triton_paths.py`), with the same calls of the interpreter on their own values. If no path is
known, a call fails, or a program cannot be recorded, the kernel's Python runs and continues from the present memory:
earlier reads and writes are answered from the record and not done twice.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from cuda_on_cpu import session, triton_bounds, triton_language, triton_speed
from cuda_on_cpu.errors import RaceError
from cuda_on_cpu.triton_names import Twin, Twins
from cuda_on_cpu.triton_numbers import python_number
from cuda_on_cpu.triton_paths import Contradiction, Effect, Launch, Paths
from cuda_on_cpu.triton_record import Recorder, Repeater, Traced, Untraceable, identity
from cuda_on_cpu.triton_together import Batch, NotTogether

_PARTS = (
    "InterpretedFunction.rewrite",
    "ReduceScanOpInterface.apply",
    "TensorDescHandle",
    "_implicit_cvt",
    "tl.core.tensor_descriptor",
    "tl.core.tensor_descriptor_base",
    "_tuple_create",
    "interpreter_semantic.builder",
    "tl.core.constexpr",
    "tl.core.dtype",
    "tl.core.tensor",
    "tl.core.tuple",
    "triton.knobs.compilation.front_end_debugging",
    "triton.knobs.language.knobs",
)
_MOST_HISTORIES = 128
_MOST_AT_ONCE, _MOST_BYTES_AT_ONCE = 128, 1 << 21
"""Programs that run as one, and the size of a block of theirs, which should fit into a cache."""
_TRIES_AT_ONCE = 3
_TRIES = 64
"""Number of recorded programs after which more programs must have been replayed; otherwise recording stops."""


def knows(module: Any) -> bool:
    """True if this interpreter has the parts that this module and `triton_language.py` use."""
    try:
        for part in _PARTS:
            operator.attrgetter(part)(module)
    except AttributeError:
        return False
    builds = module.interpreter_semantic.builder is module.interpreter_builder
    return builds and triton_speed.patches_can_be_shared(module)


class Programs:
    """The kernels of one interpreter: their launches, and recorded paths."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._twins = Twins(module)
        self._kernels: weakref.WeakKeyDictionary[Any, _Kernel] = weakref.WeakKeyDictionary()

    def replacements(self) -> list[triton_language.Replacement]:
        """(object, attribute, replacement) for calls that are recorded outside the interpreter's builder."""
        return triton_language.replacements(self._module, self._twins)

    def bind(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a kernel by name, defaults included, without the options of a compiler."""
        return self._kernel(function).bind(args, kwargs)

    def _kernel(self, function: Any) -> _Kernel:
        kernel = self._kernels.get(function)
        if kernel is None:
            kernel = self._kernels[function] = _Kernel(function)
        return kernel

    def launch(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Launch like `GridExecutor.__call__`, for arguments on the host and without hooks."""
        module, builder = self._module, self._module.interpreter_builder
        kernel = self._kernel(executor.fn)
        given = _given(module, kernel.bind(args, kwargs), frozenset(executor.constexprs))
        grid = executor.grid(given.by_name) if callable(executor.grid) else executor.grid
        assert len(grid) <= 3, "grid must have at most 3 dimensions"
        grid = tuple(grid) + (1,) * (3 - len(grid))
        builder.set_grid_dim(*grid)
        with contextlib.ExitStack() as stack:
            programs = _Grid(module, self._twins.of, executor.fn, given, kernel.history(module, given), stack)
            try:
                programs.run(_in_order(kernel, grid), session.require().policy.programs == "together")
            except Exception as failure:
                if module.triton.knobs.compilation.front_end_debugging:
                    raise
                raise module.InterpreterError(repr(failure)) from failure


def _is_race(module: Any, failure: BaseException | None) -> bool:
    """True for a RaceError, also inside of the interpreter's errors."""
    while isinstance(failure, module.InterpreterError):
        failure = failure.__cause__
    return isinstance(failure, RaceError)


def _in_order(kernel: _Kernel, grid: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """Indices of the programs of a grid, in the order of the policy."""
    indices = itertools.product(*map(range, grid))
    if session.require().policy.program_order == "forward" or kernel.may_wait:
        return indices
    return reversed(list(indices))


def _may_wait(function: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """True if a kernel, or a kernel that it calls, has a ``while`` loop: it may wait for another program."""
    code = getattr(getattr(function, "fn", function), "__code__", None)
    names = () if code is None else (*code.co_names, *code.co_freevars)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return True
    if any(isinstance(node, ast.While) for node in ast.walk(tree)):
        return True
    known = inspect.getclosurevars(function)
    called: list[Any] = [{**known.globals, **known.nonlocals}.get(name) for name in names]
    inner = [each.fn for each in called if type(each).__name__ == "InterpretedFunction" and each.fn not in seen]
    return any(_may_wait(each, seen | {function}) for each in inner)


@dataclasses.dataclass(frozen=True)
class _Given:
    """The arguments of a launch, as the kernel's Python gets them.

    `kinds` determines the paths of other launches that may be replayed, None if there are none. `inputs` are the values
    that may differ between those: handles of tensors, and floats.
    """

    by_name: dict[str, Any]
    constants: frozenset[str]
    kinds: tuple[object, ...] | None
    inputs: list[Any]


def _given(module: Any, arguments: dict[str, Any], constants: frozenset[str]) -> _Given:
    by_name = {name: arg if name in constants else module._implicit_cvt(arg) for name, arg in arguments.items()}
    inputs: list[Any] = []
    core = module.tl.core

    def kind_of(value: Any) -> object:
        if isinstance(value, core.tensor):
            inputs.append(value.handle)
            return ("tensor", str(value.type), value.handle.data.dtype)
        if type(value) is float:
            inputs.append(value)
            return float
        if isinstance(value, core.tensor_descriptor_base):
            inputs.append(value.handle)
            return ("descriptor", str(value.type), kind_of(_extent(value)))
        if isinstance(value, tuple):
            return (type(value), *[kind_of(item) for item in value])
        return identity(module, value)

    try:
        kinds = [identity(module, value) if name in constants else kind_of(value) for name, value in by_name.items()]
    except Untraceable:
        return _Given(by_name, constants, None, [])
    return _Given(by_name, constants, (*module.triton.knobs.language.knobs.items(), *kinds), inputs)


def _extent(descriptor: Any) -> tuple[Any, ...]:
    """Shape and strides of a descriptor of the kernel's Python."""
    return (tuple(descriptor.shape), tuple(descriptor.strides))


class _Kernel:
    """A function of the interpreter, and the histories of its programs by the kinds of their arguments."""

    def __init__(self, function: Any) -> None:
        self._function, self._signature = function, inspect.signature(function)
        self._histories: dict[Any, _History] = {}

    @functools.cached_property
    def may_wait(self) -> bool:
        """True if its programs may wait for others."""
        return _may_wait(self._function)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, defaults included, without the options of a compiler."""
        kwargs = {name: value for name, value in kwargs.items() if name in self._signature.parameters}
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            inspect.getcallargs(self._function, *args, **kwargs)  # raises in Triton's words
            raise
        bound.apply_defaults()
        return bound.arguments

    def history(self, module: Any, given: _Given) -> _History | None:
        """History of programs with such arguments; None if they are not to be recorded."""
        if given.kinds is None or sys.gettrace() is not None:  # a debugger wants to see each of them
            return None
        history = self._histories.get(given.kinds)
        if history is None or not all(twin.is_current() for twin in history.twins):
            if len(self._histories) >= _MOST_HISTORIES:
                self._histories.clear()
            history = self._histories[given.kinds] = _History(len(given.inputs))
        return history


class _History:
    """Recorded paths of programs whose arguments are of the same kinds."""

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self.forget()
        self.twins: set[Twin] = set()
        self.walked = self.noted = 0
        self.together = self.apart = 0
        """Number of times that several programs ran as one, and that they did not."""
        self.is_worth_it = True

    def forget(self) -> None:
        """Forget all paths, so that the next programs are recorded: an error of a walk is found by its next call."""
        self.paths = Paths(self._inputs)

    def learn(self, recorder: Recorder) -> None:
        """Add the calls of a program."""
        self.noted += 1
        self.twins |= recorder.twins
        try:
            self.paths.learn(recorder.path)
        except Contradiction:
            self.is_worth_it = False
        if self.noted > _TRIES and self.walked < self.noted:
            self.is_worth_it = False


@dataclasses.dataclass
class _Grid:
    """The programs of one launch, run one after another. Without ``history`` only the kernel's Python runs."""

    module: Any
    twin_of: Callable[[Any], Twin]
    function: Callable[..., Any]
    given: _Given
    history: _History | None
    stack: contextlib.ExitStack
    is_patched: bool = False

    def __post_init__(self) -> None:
        self.launch = Launch(self.given.inputs)

    def run(self, indices: Iterable[tuple[int, ...]], at_once: bool) -> None:
        """Run programs. ``at_once``: those of one path run together."""
        indices = iter(indices)
        while some := list(itertools.islice(indices, self._how_many() if at_once else 1)):
            self._run_some(some)

    def _how_many(self) -> int:
        history = self.history
        if history is None or not history.is_worth_it or history.apart > history.together + _TRIES_AT_ONCE:
            return 1
        if not history.paths.begins or triton_bounds.races_at_once() is None:
            return 1
        return max(1, min(_MOST_AT_ONCE, _MOST_BYTES_AT_ONCE // history.paths.largest))

    def _run_some(self, indices: list[tuple[int, ...]]) -> None:
        """Run programs, together as long as their paths are known."""
        while len(indices) > 1:
            known = self._run_together(indices)
            if known is None:
                break
            if known < len(indices):
                self._run_some(indices[:known])
                self._run_one(indices[known])
            indices = indices[known + 1 :]
        for index in indices:
            self._run_one(index)

    def _run_together(self, indices: list[tuple[int, ...]]) -> int | None:
        """Run programs as one, and return their number; or that of those before the first one whose path is not known,
        or None if they do not run as one, for any reason. Nothing has happened then."""
        history, races = self.history, triton_bounds.races_at_once()
        assert history is not None
        assert races is not None
        done = False
        races.begin_together(indices)
        try:
            history.paths.walk_together(self.launch, lambda values: Batch(self.module, races, indices, values))
            races.end_together()
            done = True
        except NotTogether as reason:
            if reason.row is not None:
                return reason.row
        except Exception:  # the programs will meet it one by one, and say where
            pass
        finally:
            races.leave_together(undo=not done)
        history.together, history.apart = history.together + done, history.apart + (not done)
        history.walked += len(indices) * done
        return len(indices) if done else None

    def _run_one(self, index: tuple[int, ...]) -> None:
        self.module.interpreter_builder.set_grid_idx(*index)
        self.run_one()

    def run_one(self) -> None:
        """Run the program that the interpreter's `set_grid_idx` named."""
        history = self.history
        if history is None or not history.is_worth_it:
            self._run_python([])
            return
        effects = history.paths.walk(self.launch)
        if effects is None:
            history.walked += 1
        else:
            self._note(history, effects)

    def _run_python(self, effects: list[Effect]) -> None:
        self._patch_language()
        with triton_language.builder_is(self.module, Repeater(self.module.interpreter_builder, effects)):
            self.twin_of(self.function).function(**self._as_tensors())

    def _note(self, history: _History, effects: list[Effect]) -> None:
        self._patch_language()
        recorder = Recorder(self.module, self.given.inputs, effects)
        try:
            function = recorder.function_of(self.twin_of(self.function))
            arguments = self._without_numbers(recorder)
            with triton_language.builder_is(self.module, recorder):
                function(**arguments)
        except Exception as failure:
            if _is_race(self.module, failure):
                history.forget()
                raise  # what the program did before is noted, and would not be found again
            self._run_python(recorder.effects)  # raises if the kernel itself is wrong
            history.is_worth_it = False
        else:
            history.learn(recorder)

    def _as_tensors(self) -> dict[str, Any]:
        """The arguments, with floats as numbers that may be used as tensors."""
        number, constants = python_number(self.module), self.given.constants
        arguments = self.given.by_name.items()
        return {name: value if name in constants else number(value) for name, value in arguments}

    def _without_numbers(self, recorder: Recorder) -> dict[str, Any]:
        core, slots = self.module.tl.core, itertools.count()

        def stand_in(value: Any) -> Any:
            if isinstance(value, core.tensor):
                return core.tensor(Traced(next(slots), value.handle.dtype), value.type)
            if isinstance(value, core.tensor_descriptor_base):
                handle = Traced(next(slots), None)
                return core.tensor_descriptor(handle, *stand_in(_extent(value)), value.block_type)
            if type(value) is float:
                return recorder.number(next(slots))
            return self.module._tuple_create(value, map(stand_in, value)) if isinstance(value, tuple) else value

        arguments = self.given.by_name.items()
        return {name: value if name in self.given.constants else stand_in(value) for name, value in arguments}

    def _patch_language(self) -> None:
        if not self.is_patched:
            self.stack.enter_context(triton_language.patched(self.module))
            self.is_patched = True
