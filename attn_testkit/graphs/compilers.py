"""Compilers and tuners that work inside of a backend's call: noticed while they do, and known in a traceback.

What they do is done once for a kernel, and is no part of a step as a server runs it: they wait for the device, copy
constants to it, and time what they made.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["TUNERS", "Tuner", "at_work_in", "forget_compiled", "make_room", "while_compilers_work"]


@dataclass(frozen=True)
class Tuner:
    """A function that times kernels, or compiles one, where it is called."""

    module: str
    path: str
    """``function`` or ``Class.method``."""


TUNERS = (
    Tuner("triton.runtime.autotuner", "Autotuner._bench"),
    Tuner("triton.testing", "do_bench"),
    Tuner("triton.testing", "do_bench_cudagraph"),
    # Not among what torch._dynamo.callback reports: "temporarily disabled due to spam".
    Tuner("torch._inductor.runtime.triton_heuristics", "CachingAutotuner.autotune_to_one_config"),
    Tuner("torch._inductor.runtime.triton_heuristics", "CachingAutotuner.coordinate_descent_tuning"),
    Tuner("flashinfer.autotuner", "AutoTuner._profile_single_kernel"),
    Tuner("flashinfer.autotuner.autotuner", "AutoTuner._profile_single_kernel"),
    Tuner("tilelang.profiler", "do_bench"),
    Tuner("tilelang.profiler.bench", "do_bench"),
    Tuner("tilelang.autotuner.tuner", "AutoTuner.run"),
    Tuner("cutlass.base_dsl.compiler", "CompileCallable.__call__"),
)
"""Those that are noticed beside what torch.compile says of itself. One that a package lacks is passed over."""

_FILES = re.compile(
    r"/torch/_dynamo/convert_frame\.py$|/torch/_inductor/(compile_fx|graph|select_algorithm|autotune_process)\.py$"
    r"|/torch/_inductor/runtime/(triton_heuristics|benchmarking)\.py$"
    r"|/triton/(testing|runtime/autotuner|compiler/.*)\.py$|/tilelang/(autotuner|jit|profiler)/|/flashinfer/(autotuner|jit)[/.]"
    r"|/cutlass/base_dsl/"
)
"""Where compilers and tuners stand. A call of what was compiled passes through none of these, but for ``run`` of a
tuner, which is not told from its tuning: who is taken for a compiler is only asked once more."""


_PACKAGES = ("torch._dynamo", "torch._inductor")
"""Whose exceptions have their tracebacks shortened."""


def at_work_in(error: BaseException) -> bool:
    """Whether an exception, or what it was raised from, came from inside a compiler or tuner."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if type(each).__module__.startswith(_PACKAGES):
            return True
        if any(_FILES.search(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(each.__traceback__)):
            return True
        chain += [each.__cause__, each.__context__]
    return False


def forget_compiled() -> None:
    """Have torch.compile begin anew: it remembers functions that it failed to compile, and runs them without."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def make_room() -> None:
    """To be called before a server would start: have torch.compile forget what it made, if that is much.

    It gives a function up that it compiled ``recompile_limit`` times, which for a server is one model's configurations,
    and a process of the kit runs those of many.
    """
    dynamo, frames = sys.modules.get("torch._dynamo"), sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None or frames is None:
        return
    compiled = max(getattr(frames, "FRAME_COMPILE_COUNTER", {}).values(), default=0)
    if compiled > dynamo.config.recompile_limit // 2:
        dynamo.reset()


@contextmanager
def while_compilers_work(begins: Callable[[], object], ends: Callable[[], object]) -> Iterator[None]:
    """Call ``begins`` when a compiler or tuner starts to work inside the block and ``ends`` when it is done.

    Of those that work inside one another, and for packages that are imported before the block.
    """
    depth = 0

    def enter(*_: object) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            begins()

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            ends()

    with ExitStack() as stack:
        _listen(stack, enter, leave)
        for owner, name, function in _present():
            stack.callback(setattr, owner, name, function)
            setattr(owner, name, _around(function, enter, leave))
        yield


def _listen(stack: ExitStack, enter: Callable[..., None], leave: Callable[..., None]) -> None:
    """Hear from torch.compile. ``torch._dynamo.reset()`` forgets who listens."""
    dynamo = sys.modules.get("torch._dynamo.callback")
    if dynamo is None:
        return
    handler = dynamo.callback_handler
    for callbacks, function in ((handler.start_callbacks, enter), (handler.end_callbacks, leave)):
        callbacks.append(function)
        stack.callback(_forget, callbacks, function)


def _forget(callbacks: list[Any], function: Any) -> None:
    if function in callbacks:
        callbacks.remove(function)


def _present() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, function) of each tuner whose module is imported."""
    for tuner in TUNERS:
        owner: Any = sys.modules.get(tuner.module)
        *classes, name = tuner.path.split(".")
        for each in classes:
            owner = getattr(owner, each, None)
        function = None if owner is None else vars(owner).get(name)
        if callable(function):
            yield owner, name, function


def _around(function: Any, enter: Callable[[], None], leave: Callable[[], None]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        enter()
        try:
            return function(*args, **kwargs)
        finally:
            leave()

    return call
