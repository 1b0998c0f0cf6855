"""`triton.language` for a program that is recorded: where the interpreter reads values, it asks the recorder. Outside a
recording the language is unchanged.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cuda_on_cpu import session, triton_speed
from cuda_on_cpu.triton_bounds import LETS_NEXT_BEGIN, WAITS, threads_meet
from cuda_on_cpu.triton_names import Twins, as_int, language_range_of, recorder_of
from cuda_on_cpu.triton_paths import Kind
from cuda_on_cpu.triton_quick import reduction_together, shorter_reduction
from cuda_on_cpu.triton_record import Traced, Untraceable
from cuda_on_cpu.triton_signatures import complaint, stock_of
from cuda_on_cpu.triton_together import in_place, reduction_at_once

Replacement = tuple[Any, str, Any]
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


_OF_NUMPY = {"_sum_combine": np.add, "_elementwise_max": np.fmax, "_elementwise_min": np.fmin}
"""Reductions that NumPy does with one call."""


@contextlib.contextmanager
def builder_is(module: Any, builder: Any) -> Iterator[None]:
    """Let the language pass its calls to `builder`."""
    semantic = module.interpreter_semantic
    before, semantic.builder = semantic.builder, builder
    try:
        yield
    finally:
        semantic.builder = before


class _CurrentBuilder:
    """The builder to which the language passes its calls now."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module.interpreter_semantic.builder, name)


@contextlib.contextmanager
def patched(module: Any) -> Iterator[None]:
    """The language as the interpreter patches it for a launch, also usable for recordings."""
    own = module.interpreter_builder
    module.interpreter_builder = _CurrentBuilder(module)  # Triton 3.6 gives every call the builder that it finds here
    try:
        scope = triton_speed.patch_language(module)
    finally:
        module.interpreter_builder = own
    new = [one for one, fits in zip(language_replacements(module), _fits(module), strict=True) if fits]
    replaced = [(owner, name, vars(owner)[name]) for owner, name, _ in new]
    try:
        for owner, name, value in new:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        scope.restore()


@functools.cache
def _fits(module: Any) -> list[bool]:
    """True for each replacement that takes the interpreter's own arguments. Call it while the language is patched."""
    return [not complaint(stock_of(owner, name), new) for owner, name, new in language_replacements(module)]


def language_replacements(module: Any) -> list[Replacement]:
    """Replacements for the language as the interpreter patched it."""
    tensor, core = module.tl.core.tensor, module.tl.core
    return [
        (tensor, "__bool__", _seen_as(module, "bool", _as_bool)),
        (tensor, "__index__", _seen_as(module, "int", as_int)),
        (tensor, "__repr__", _unseen(tensor.__repr__)),
        (tensor, "__str__", _unseen(tensor.__str__)),
        (tensor, "T", property(_transposed_of(module, vars(tensor)["T"].fget))),
        (module.tl, "range", language_range_of(module, module.tl.range)),
        (core, "range", language_range_of(module, core.range)),
        (module.tl, "static_print", _print_of(module, module.tl.static_print)),
        *_dependent_launches(module),
    ]


def _dependent_launches(module: Any) -> list[Replacement]:
    """Calls with which kernels overlap (programmatic dependent launch). Here each kernel begins when the previous one
    has ended, so the calls are only reported to the detector of races."""
    cuda = module.tl.extra.cuda

    def wait(*_: Any, **__: Any) -> None:
        module.interpreter_semantic.builder.create_barrier(WAITS)

    def let_next_begin(*_: Any, **__: Any) -> None:
        module.interpreter_semantic.builder.create_barrier(LETS_NEXT_BEGIN)

    calls = (("gdc_wait", wait), ("gdc_launch_dependents", let_next_begin))
    return [(cuda, name, call) for name, call in calls if hasattr(cuda, name)]


def _as_bool(handle: Any) -> bool:
    """Truth value of a tensor in the interpreter: only a tensor of one element can be false."""
    return bool(handle.data) if handle.data.size == 1 else True


def _seen_as(module: Any, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def see(self: Any) -> Any:
        recorder = recorder_of(module)
        if recorder is None or type(self.handle) is not Traced:
            return run(self.handle)  # stock, Triton 3.6 fails with NumPy 2.5
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


def replacements(module: Any, twins: Twins) -> list[Replacement]:
    """(object, attribute, replacement) for functions that a kernel calls outside the interpreter's builder."""
    function, reductions = module.InterpretedFunction, module.ReduceScanOpInterface
    return [
        (function, "__call__", _nested_call_of(module, triton_speed.nested_call_of(module), twins)),
        (reductions, "apply", _apply_of(module, reductions.apply)),
        (reductions, "to_tensor", _narrowed_of(module)),
    ]


def _narrowed_of(module: Any) -> Callable[..., Any]:
    """The result of a reduction as a tensor. Before Triton 3.9 a number that its type does not hold was an error; on a
    device, and in later releases, it wraps around."""
    core, handle = module.tl.core, module.TensorHandle

    def to_tensor(self: Any, ret: Any, dtype: Any) -> Any:
        block = bool(getattr(ret, "shape", ()))
        data = (ret if block else np.array([ret])).astype(module._get_np_dtype(dtype))
        return core.tensor(handle(data, dtype.scalar), core.block_type(dtype, list(data.shape)) if block else dtype)

    return to_tensor


def _nested_call_of(module: Any, stock: Callable[..., Any], twins: Twins) -> Callable[..., Any]:
    def nested_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = recorder_of(module)
        if recorder is None and not session.is_active():
            return stock(self, *args, **kwargs)
        try:
            twin = twins.of(self.rewrite())
            function = twin.function if recorder is None else recorder.function_of(twin)
            return function(*args, **kwargs)
        except Exception as failure:
            raise module.InterpreterError(repr(failure)) from failure

    return nested_call


def _apply_of(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    core, standard = module.tl.core, module.tl.standard
    known = [getattr(standard, name, None) for name in _COMBINATIONS]
    of_numpy = {id(getattr(standard, name, None)): ufunc for name, ufunc in _OF_NUMPY.items()}

    def apply(self: Any, input: Any) -> Any:
        recorder = recorder_of(module)
        if recorder is None or not isinstance(input, tuple):
            threads_meet()
            return stock(self, input)
        if not any(self.combine_fn is one for one in known):
            raise Untraceable("a reduction by a function of the kernel's own")
        kinds = [tensor.type for tensor in input]

        def run(*handles: Any) -> Any:
            return stock(self, tuple(core.tensor(*pair) for pair in zip(handles, kinds, strict=True)))

        ufunc = of_numpy.get(id(self.combine_fn)) if type(self) is module.ReduceOps else None
        together = None
        if ufunc is not None and len(input) == 1:
            one = recorder.value(recorder.slot(input[0].handle))
            answer = run(one)
            short = shorter_reduction(module.TensorHandle, ufunc, self.axis, self.keep_dims, one, answer)
            if short is not None:
                run = short
                together = reduction_at_once(reduction_together(ufunc, self.axis, self.keep_dims, one, answer), one)
        options = [(key, value) for key, value in vars(self).items() if key != "combine_fn"]
        name = (type(self).__name__, self.combine_fn.fn.__name__, *options, *map(str, kinds))
        slot = recorder.note(name, Kind.PURE, run, *[tensor.handle for tensor in input], together=together)
        return tuple(
            core.tensor(
                recorder.wrapped(
                    recorder.note(f"handle {i}", Kind.PURE, _handle_of(i), Traced(slot, None), together=in_place(i))
                ),
                found.type,
            )
            for i, found in enumerate(recorder.value(slot))
        )

    return apply


def _handle_of(index: int) -> Callable[..., Any]:
    return lambda tensors: tensors[index].handle
