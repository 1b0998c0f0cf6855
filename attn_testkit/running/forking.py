"""The process that workers are forked from: it has imported torch and the kit, no candidate, and never meets CUDA."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

__all__ = ["SERVE", "begin_forking", "fork_context", "preload"]

SERVE = "attn_testkit.running.worker"
"""Module whose ``serve`` a worker runs."""
_preloaded = [SERVE, "attn_testkit.running.judging"]
_EMULATED = ["torch.fx.experimental.symbolic_shapes", "triton.runtime.interpreter"]
"""What the emulation has every worker import: torch decomposes a product of matrices, and kernels are interpreted."""
_LAST = "attn_testkit.running.ready"


def preload(module: str) -> None:
    """Have workers forked from a process that has imported this too. To be said before the first one starts."""
    if module not in _preloaded:
        _preloaded.append(module)


def fork_context() -> ForkServerContext:
    """Where workers are started."""
    context = multiprocessing.get_context("forkserver")
    emulated = os.environ.get("TRITON_INTERPRET") == "1"
    context.set_forkserver_preload([*_preloaded, *(_EMULATED if emulated else ()), _LAST])
    return context


def begin_forking() -> None:
    """Start that process now: it imports while the caller does."""
    fork_context()
    forkserver.ensure_running()
