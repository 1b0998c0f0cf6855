"""Triton kernels under the interpreter (TRITON_INTERPRET=1): launches are recorded, replayed and checked like any
other kernel."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuda_on_cpu import (
    session,
    triton_autotune,
    triton_bounds,
    triton_descriptors,
    triton_floats,
    triton_memory,
    triton_programs,
    triton_signatures,
    triton_speed,
)
from cuda_on_cpu.accesses import Access, Span
from cuda_on_cpu.capture import Capture
from cuda_on_cpu.chosen_places import Places
from cuda_on_cpu.errors import EmulationError, HostPointerError
from cuda_on_cpu.private import disable_functions, disable_modes
from cuda_on_cpu.program import CallNode
from cuda_on_cpu.sites import author_site
from cuda_on_cpu.tags import is_device, is_pinned
from cuda_on_cpu.triton_driver import interpreter

Replacement = tuple[Any, str, Any]


def replacements() -> list[Replacement]:
    """(object, attribute, replacement) for the launcher, the functions that it computes with, and the tuner above
    it."""
    module = interpreter()
    if module is None:
        return []
    return replacements_in(module)


@functools.cache
def replacements_in(module: Any) -> list[Replacement]:
    """Replacements that fit this interpreter's functions; functions without one stay unchanged."""
    launcher = module.GridExecutor
    programs = triton_programs.Programs(module) if triton_programs.knows(module) else None
    return triton_signatures.fitting(all_replacements(module, launcher, programs))


def all_replacements(module: Any, launcher: Any, programs: triton_programs.Programs | None) -> list[Replacement]:
    """All replacements for an interpreter, whether or not they fit this release."""
    return [
        (launcher, "__call__", _launch_of(module, programs, launcher, launcher.__call__)),
        *triton_speed.replacements(module),
        *triton_floats.replacements(module),
        *triton_memory.replacements(module),
        *triton_descriptors.replacements(module),
        *(programs.replacements() if programs is not None else []),
        *triton_autotune.replacements(),
    ]


def _launch_of(
    module: Any, programs: triton_programs.Programs | None, launcher: Any, stock: Callable[..., Any]
) -> Callable[..., Any]:
    def run(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            run_all(executor, args, kwargs)
        except module.InterpreterError as error:
            # The interpreter keeps only the text, once more for each function that was called.
            cause = error.__cause__
            while isinstance(cause, module.InterpreterError):
                cause = cause.__cause__
            if isinstance(cause, EmulationError):
                raise cause from None
            raise

    def run_all(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if session.is_active() and not isinstance(executor.grid, _Grid):
            executor.grid = _Grid(executor.grid, executor.fn.__name__)
        with torch.inference_mode(), disable_modes(), disable_functions(), contextlib.ExitStack() as stack:
            # A device says nothing of a NaN: rows of padding may be made of them.
            stack.enter_context(np.errstate(all="ignore"))
            if session.is_active():
                given = _given(executor, args, kwargs)
                touched = _account_of(executor, given)
                current = session.require()
                before = _may_still_run(current) if kwargs.get("launch_pdl") else None
                warps = kwargs.get("num_warps") or 4
                current.before = None  # gives its memory back before as much is taken again
                races = stack.enter_context(
                    triton_bounds.looking_at_accesses(
                        executor.fn.__name__, given, touched, current.policy, before, warps
                    )
                )
                current.before = None if races is None else (current.stream.cuda_stream, races.used)
            if programs is not None and session.is_active() and not executor.pre_run_hooks:
                programs.launch(executor, args, kwargs)
                return
            if session.is_active() and triton_speed.patches_can_be_shared(module):
                stack.callback(triton_speed.patch_language(module).restore)
            stock(executor, *args, **kwargs)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        current = session.current()
        if current is None:
            stock(self, *args, **kwargs)
            return
        _refuse_wrong_floats(module, self)
        if programs is not None and callable(self.grid):
            args, kwargs = _sized(programs, self, args, kwargs)
        with disable_functions():
            pointers = _pointers((*args, *kwargs.values()))
            _refuse_host_pointers(self, pointers)
        if current.launched is not None:
            current.launched(self, args, kwargs)
        capture = current.capture
        if capture is None or not current.recording:
            if not current.delays(functools.partial(run, self, args, kwargs)):
                run(self, args, kwargs)
            return
        with disable_modes(), disable_functions():
            _record(capture, launcher, self, args, kwargs, pointers, run)
        capture.note_work(current.stream, capture.nodes[-1])

    return launch


def _may_still_run(current: session.Session) -> Any:
    """Memory that the last launch of the stream uses; None if something else has been launched since."""
    stream, used = current.before or (None, None)
    return used if stream == current.stream.cuda_stream else None


def _sized(
    programs: triton_programs.Programs, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the grid's function, and return the arguments of the launch.

    On a GPU the function gets a dict of the arguments by name, and the launch uses the contents of that dict
    afterwards: vLLM's and SGLang's
    ``causal_conv1d_fn`` exchange two pointers there.
    """
    given = programs.bind(executor.fn, args, kwargs)
    held = dict(given)
    executor.grid = _Grid(tuple(executor.grid(given)), executor.fn.__name__)
    changed = {name: value for name, value in given.items() if value is not held.get(name)}
    if not changed:
        return args, kwargs
    return (), {**dict(zip(executor.arg_names, args, strict=False)), **kwargs, **changed}


def _account_of(executor: Any, given: dict[str, Tensor]) -> triton_bounds.Touched | None:
    """Function that reports each address range of a launch once to the order of streams; None if streams are not
    tracked."""
    order, stream = session.require().account, session.require().stream.cuda_stream
    if order is None:
        return None
    for tensor in given.values():
        if is_device(tensor):
            order.knows(tensor.untyped_storage())
    told: set[tuple[int, int, bool]] = set()
    what = f"launch of triton kernel {executor.fn.__name__}"

    def touched(start: int, first: int, end: int, writes: bool, every: Callable[[], Places | None]) -> None:
        if (first, end, writes) not in told:
            order.touch_address(start, Access(first, end, Span.SOME, writes, every()), stream, what)
            told.add((first, end, writes))

    return touched


def _record(
    capture: Capture,
    launcher: Any,
    executor: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pointers: list[Tensor],
    run: Callable[..., None],
) -> None:
    for pointer in pointers:  # a kernel may write through any of them
        capture.about_to_write(pointer)
    grid = _Grid(executor.grid, executor.fn.__name__)
    executor.grid = grid
    run(executor, args, kwargs)
    node = CallNode(f"triton kernel {executor.fn.__name__}", author_site())
    frozen_args = tuple(_freeze(value, capture, node) for value in args)
    frozen_kwargs = {name: _freeze(value, capture, node) for name, value in kwargs.items()}
    frozen = launcher(executor.fn, executor.arg_names, grid.value, executor.pre_run_hooks)

    def again() -> None:
        session.require().before = None  # what runs between the kernels of a graph is not counted
        run(frozen, frozen_args, frozen_kwargs)

    node.call = again
    capture.retire_dropped_blocks()
    capture.nodes.append(node)


_LARGEST_GRID = (2**31 - 1, 65_535, 65_535)
"""Largest x, y and z of a grid in CUDA (sglang #34941)."""


class _Grid:
    """The launch grid, with the numbers of the capture."""

    def __init__(self, grid: Any, kernel: str) -> None:
        self._grid, self._kernel = grid, kernel
        self.value: tuple[int, ...] = () if callable(grid) else tuple(int(size) for size in grid)

    def __call__(self, arguments: dict[str, Any]) -> tuple[int, ...]:
        if callable(self._grid):
            self.value = tuple(int(size) for size in self._grid(arguments))
        if any(size > most for size, most in zip(self.value, _LARGEST_GRID, strict=False)):
            raise EmulationError(
                f"launch of triton kernel {self._kernel} with a grid of {self.value}",
                author_site(),
                "CUDA would refuse with 'Triton Error [CUDA]: invalid argument': y and z hold 65,535 programs at most",
                "put what grows with rows or requests into the first dimension",
            )
        return self.value


def _pointers(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found += _pointers(value)
        elif hasattr(value, "base"):  # TensorDescriptor of a tensor or of a TensorWrapper, TensorWrapper
            found += _pointers((value.base,))
    return found


def _given(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of a launch, by the names of their arguments."""
    names = [*executor.arg_names[: len(args)], *kwargs]
    found: dict[str, Tensor] = {}
    for name, value in zip(names, (*args, *kwargs.values()), strict=False):
        for index, tensor in enumerate(_pointers((value,))):
            found[f"{name}[{index}]" if isinstance(value, tuple) else name] = tensor
    return found


def _refuse_wrong_floats(module: Any, executor: Any) -> None:
    wrong = triton_floats.complaint(module)
    if wrong:
        raise EmulationError(
            f"launch of triton kernel {executor.fn.__name__}",
            author_site(),
            f"this Triton's interpreter is not one that this package knows, and would compute wrong numbers: {wrong}",
            "use a Triton that the package supports",
        )


def _refuse_host_pointers(executor: Any, pointers: list[Tensor]) -> None:
    for pointer in pointers:
        if is_pinned(pointer):  # mapped into the device
            session.require().device_uses(pointer)
        elif not is_device(pointer):
            raise HostPointerError(
                f"launch of triton kernel {executor.fn.__name__}",
                author_site(),
                "Triton would refuse with 'Pointer argument cannot be accessed from Triton (cpu tensor?)'",
                "pass device tensors",
            )


def _freeze(value: Any, capture: Capture, node: CallNode) -> Any:
    if isinstance(value, Tensor):
        block = capture.block(value)
        block.movable = False  # the next launch may find the addresses of this one remembered
        node.blocks.append(block)
        with torch.inference_mode():
            return block.alias(value)
    if isinstance(value, tuple):
        items = [_freeze(item, capture, node) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if _pointers((value,)):
        twin = copy.copy(value)
        twin.base = _freeze(value.base, capture, node)
        return twin
    return value
