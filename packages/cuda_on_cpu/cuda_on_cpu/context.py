"""The entry to the emulation: `with emulated_cuda(): ...`"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cuda_on_cpu import session
from cuda_on_cpu.functions import DeviceFunctions
from cuda_on_cpu.installation import INSTALLED
from cuda_on_cpu.policy import Policy
from cuda_on_cpu.session import Session
from cuda_on_cpu.streams import Stream, default_stream


@contextlib.contextmanager
def emulated_cuda(policy: Policy | None = None) -> Iterator[None]:
    """Run the block as an ordinary CUDA program on CPU memory.

    Inside it `device="cuda"`, `torch.cuda.CUDAGraph`, streams, events, pinned memory and Triton launches under the
    interpreter work, and a program that breaks or reads stale data under a CUDA graph on a GPU does so here as well. It
    may be nested (an inner policy applies until the inner block ends); each thread enters it separately. Everything is
    restored at the end. The block raises EmulationError, or a subclass, if the program would fail on a GPU; entering
    raises RuntimeError if torch's private APIs are not those that this package expects.
    """
    outer = session.current()
    if outer is not None:
        with _nested(outer, policy):
            yield
        return
    INSTALLED.enter()
    current = Session(policy or Policy(), default_stream(), Stream(counts=False), INSTALLED.entries)
    current.function_mode = DeviceFunctions(current)
    session.install(current)
    try:
        with current.function_mode:
            yield
            current.late.catch_up()
    finally:
        current.late.forget()
        current.abandon_capture()
        if current.order is not None:
            current.order.all_done()
        session.install(None)
        INSTALLED.leave()


@contextlib.contextmanager
def _nested(current: Session, policy: Policy | None) -> Iterator[None]:
    before = current.policy, current.stream, current.sync_mode, current.capture
    current.policy = policy or current.policy
    try:
        yield
        current.late.catch_up()
    finally:
        if current.capture is not before[3]:
            current.abandon_capture()
        current.policy, current.stream, current.sync_mode, _ = before
