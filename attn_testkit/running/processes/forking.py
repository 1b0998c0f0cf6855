"""The process that workers are forked from. It has imported torch and the kit but no candidate, and never initializes
CUDA."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from typing import Any, NoReturn

SERVE = "attn_testkit.running.case_runs.worker_main"
"""Module whose ``serve`` a worker runs."""
_preloaded = [SERVE, "attn_testkit.running.case_runs.lane_process"]
_EMULATED = ["torch.fx.experimental.symbolic_shapes", "triton.runtime.interpreter"]
"""Modules that every worker imports under emulation: torch decomposes matrix products, and kernels are interpreted."""
_LAST = "attn_testkit.running.processes.ready"
_spawn = util.spawnv_passfds


def preload(module: str) -> None:
    """Let workers be forked from a process that has imported this module too. Call it before the first worker
    starts."""
    if module not in _preloaded:
        _preloaded.append(module)


def fork_context() -> ForkServerContext:
    """Context of ``multiprocessing`` in which workers are started."""
    context = multiprocessing.get_context("forkserver")
    emulated = os.environ.get("TRITON_INTERPRET") == "1"
    context.set_forkserver_preload([*_preloaded, *(_EMULATED if emulated else ()), _LAST])
    return context


def begin_forking() -> None:
    """Start the process that workers are forked from now, so that it imports while the caller does."""
    fork_context()
    forkserver.ensure_running()


def fork_off() -> None:
    """Start the process that workers are forked from now, as a fork of this one: torch and the kit are imported once
    for both. Use it only in a process that has just begun and has one thread, because the fork keeps everything except
    files. Raises what the kit's import raises.
    """
    for name in _preloaded:
        importlib.import_module(name)
    # It is started in the same way.
    resource_tracker.ensure_running()
    util.spawnv_passfds = _fork
    try:
        begin_forking()
    finally:
        util.spawnv_passfds = _spawn


def _fork(path: object, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Replacement of ``multiprocessing.util.spawnv_passfds``: a fork that runs ``args``, ``python -c CODE``, with the
    files 0 to 2 and ``passfds``.
    """
    # Buffered output would otherwise be printed by both processes.
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # From Python 3.12 on it warns where a package keeps threads, as OpenBLAS does: the fork uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    # Here nobody comes back to do it, and all workers would start processes so.
    util.spawnv_passfds = _spawn
    # Held where this was called from. A lane, which is forked from here, starts a process like this one for itself.
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
    _carry_out(args[-1], passfds)


def _carry_out(code: str, kept: Sequence[int]) -> NoReturn:
    status = 1
    try:
        for first, last in _between(sorted(kept)):
            os.closerange(first, last)
        exec(code, {})
        status = 0
    except (SystemExit, EOFError):
        # An end of file: the process that asked for a worker ended before it had sent its files, as after ``-x``.
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        # Nothing of the other's may run at the end of this one.
        os._exit(status)


def _between(kept: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of the file descriptors above 2 that are not kept."""
    first = 3
    for number in kept:
        yield first, number
        first = number + 1
    yield first, os.sysconf("SC_OPEN_MAX")
