"""Compilers and tuners that work inside a backend's call: detected while they work, and recognized in a traceback.

They work once per kernel, and their work is not part of a step of a server: they wait for the device, copy constants to
it, and time kernels.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Compilation:
    """A function that torch.compile compiled although it had compiled it before."""

    id: str
    """Number of the compilation, which torch.compile reuses after a reset, and its start time."""
    what: str
    """``function (file:line)``."""
    why: str
    """Reason that torch.compile gave: the guard of the last compilation that failed, in a line."""


@dataclass(frozen=True)
class Tuner:
    """A function that times or compiles kernels when it is called."""

    module: str
    path: str
    """``function`` or ``Class.method``."""
    words: str
    """Name in messages."""


TUNERS = (
    Tuner("triton.runtime.autotuner", "Autotuner._bench", "triton.autotune"),
    # With emulated CUDA a configuration is chosen without timing anything.
    Tuner("cuda_on_cpu.triton_autotune", "choose", "triton.autotune"),
    Tuner("triton.runtime.jit", "JITFunction._do_compile", "triton.jit"),
    Tuner("triton.testing", "do_bench", "do_bench"),
    Tuner("triton.testing", "do_bench_cudagraph", "do_bench_cudagraph"),
    # Not among what torch._dynamo.callback reports: "temporarily disabled due to spam".
    Tuner(
        "torch._inductor.runtime.triton_heuristics", "CachingAutotuner.autotune_to_one_config", "Inductor's autotuner"
    ),
    Tuner(
        "torch._inductor.runtime.triton_heuristics",
        "CachingAutotuner.coordinate_descent_tuning",
        "Inductor's autotuner",
    ),
    Tuner("flashinfer.autotuner", "AutoTuner._profile_single_kernel", "FlashInfer's autotuner"),
    Tuner("flashinfer.autotuner.autotuner", "AutoTuner._profile_single_kernel", "FlashInfer's autotuner"),
    Tuner("tilelang.profiler", "do_bench", "do_bench"),
    Tuner("tilelang.profiler.bench", "do_bench", "do_bench"),
    Tuner("tilelang.autotuner.tuner", "AutoTuner.run", "TileLang's autotuner"),
    Tuner("cutlass.base_dsl.compiler", "CompileCallable.__call__", "CuTe's compiler"),
)
"""Compilers and tuners that are detected in addition to torch.compile's own callbacks. One that a package lacks is
skipped."""

_FILES = re.compile(
    r"/torch/_dynamo/convert_frame\.py$|/torch/_inductor/(compile_fx|graph|select_algorithm|autotune_process)\.py$"
    r"|/torch/_inductor/runtime/(triton_heuristics|benchmarking)\.py$"
    r"|/triton/(testing|runtime/autotuner|compiler/.*)\.py$|/tilelang/(autotuner|jit|profiler)/"
    r"|/flashinfer/(autotuner|jit)[/.]"
    r"|/cutlass/base_dsl/"
)
"""Files of compilers and tuners. Calls of compiled code do not pass through them, except ``run`` of a tuner, which
cannot be distinguished from tuning. A false match only costs one more run."""


_PACKAGES = ("torch._dynamo", "torch._inductor")
"""Modules whose exceptions have shortened tracebacks."""


def at_work_in(error: BaseException) -> bool:
    """True if an exception, or its cause, came from inside a compiler or tuner."""
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
    """Reset torch.compile, which remembers functions that it failed to compile and no longer compiles them."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        with warnings.catch_warnings():
            # The reset imports more of torch, and that warns.
            warnings.simplefilter("ignore")
            dynamo.reset()


_ROOM = 5
"""Number of compilations of a function that a run may need; torch's own limit is 8."""


def make_room() -> None:
    """Reset torch.compile if it is near its limit. Called at the point where a server would start.

    torch.compile stops compiling a function after ``recompile_limit`` compilations. In a server these are the
    configurations of one model, but a process of the kit runs many models.
    """
    if room_left() < _ROOM:
        forget_compiled()


def room_left() -> int:
    """Number of compilations left for the function that torch.compile has compiled most often."""
    dynamo, frames = sys.modules.get("torch._dynamo"), sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None or frames is None:
        return sys.maxsize
    limit: int = dynamo.config.recompile_limit
    return limit - max(getattr(frames, "FRAME_COMPILE_COUNTER", {}).values(), default=0)


def compilations() -> list[Compilation]:
    """Recompilations by torch.compile so far, in order; it remembers only some of the last."""
    utils = sys.modules.get("torch._dynamo.utils")
    metrics = utils.get_compilation_metrics() if utils is not None else ()
    again = (each for each in metrics if getattr(each, "recompile_reason", None))
    return [
        Compilation(
            f"{each.compile_id} {getattr(each, 'start_time_us', None)}",
            f"{each.co_name} ({os.path.basename(each.co_filename or '')}:{each.co_firstlineno})",
            _REASON.sub("", each.recompile_reason.splitlines()[0]).strip(),
        )
        for each in again
    ]


_REASON = re.compile(r"^\d+/\d+: |\s+# .*$")
"""Parts of a line that are not the reason: the number of a compilation, and a line of code."""


@contextmanager
def recompiling_allowed() -> Iterator[None]:
    """Lift the limit on recompilations of torch.compile inside the block."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return
    with dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
        yield


_NO_LIMIT = 1 << 20


@contextmanager
def while_compilers_work(begins: Callable[[str], object], ends: Callable[[], object]) -> Iterator[None]:
    """Call ``begins`` with the work's name when a compiler or tuner starts inside the block, ``ends`` when it is done.

    Only the outermost of nested ones counts, and only packages that were imported before the block.
    """
    depth = 0

    def enter(work: str) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            begins(work)

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            ends()

    with ExitStack() as stack:
        _listen(stack, enter, leave)
        for owner, name, function, words in _present():
            stack.callback(setattr, owner, name, function)
            setattr(owner, name, _around(function, words, enter, leave))
        yield


def _listen(stack: ExitStack, enter: Callable[[str], None], leave: Callable[..., None]) -> None:
    """Register callbacks with torch.compile; ``torch._dynamo.reset()`` removes them."""
    dynamo = sys.modules.get("torch._dynamo.callback")
    if dynamo is None:
        return
    handler = dynamo.callback_handler
    begins = functools.partial(_first_of, enter, "torch.compile")
    for callbacks, function in ((handler.start_callbacks, begins), (handler.end_callbacks, leave)):
        callbacks.append(function)
        stack.callback(_forget, callbacks, function)


def _first_of(function: Callable[[str], None], work: str, _: object) -> None:
    function(work)


def _forget(callbacks: list[Any], function: Any) -> None:
    if function in callbacks:
        callbacks.remove(function)


def _present() -> Iterator[tuple[Any, str, Any, str]]:
    """(owner, name, function, words) of each tuner whose module is imported."""
    for tuner in TUNERS:
        owner: Any = sys.modules.get(tuner.module)
        *classes, name = tuner.path.split(".")
        for each in classes:
            owner = getattr(owner, each, None)
        function = None if owner is None else vars(owner).get(name)
        if callable(function):
            yield owner, name, function, tuner.words


def _around(function: Any, work: str, enter: Callable[[str], None], leave: Callable[[], None]) -> Any:
    method = "." in function.__qualname__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A tuner has the function that it tunes, and a kernel its own name.
        owner = args[0] if args else None
        kernel = getattr(getattr(owner, "base_fn", owner if method else None), "__name__", "")
        enter(f"{work}, of kernel {kernel}" if kernel else work)
        try:
            return function(*args, **kwargs)
        finally:
            leave()

    return call
