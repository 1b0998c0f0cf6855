"""Watching the host while a backend plans and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch

from .compilers import while_compilers_work

__all__ = ["host_syncs_forbidden"]


@contextmanager
def host_syncs_forbidden(forbidden: bool = True, worked: Callable[[str], object] = lambda work: None) -> Iterator[None]:
    """Inside, any operation that makes the host wait for the device raises ``RuntimeError``.

    So does switching that off: whoever plans could wait unseen, and switch it on again. A compiler or tuner that works
    inside may wait: it does so once for a kernel, and one that is refused gives the kernel up for good. ``worked`` is
    told of each, also where waits are not ``forbidden``.
    """
    if not forbidden:
        with while_compilers_work(worked, lambda: None):
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    with ExitStack() as stack:
        stack.callback(torch.cuda.set_sync_debug_mode, before)
        setters = [(owner, name, getattr(owner, name)) for owner, name in _SETTERS if hasattr(owner, name)]
        for owner, name, setter in setters:
            stack.callback(setattr, owner, name, setter)
            setattr(owner, name, _refuse)

        def switch(mode: int | str) -> None:
            for owner, name, setter in setters:
                setattr(owner, name, setter)
            torch.cuda.set_sync_debug_mode(mode)
            for owner, name, _ in setters:
                setattr(owner, name, _refuse)

        def let_wait(work: str) -> None:
            worked(work)
            switch(before)

        stack.enter_context(while_compilers_work(let_wait, lambda: switch("error")))
        yield


_SETTERS: tuple[tuple[Any, str], ...] = (
    (torch.cuda, "set_sync_debug_mode"),
    (torch._C, "_cuda_set_sync_debug_mode"),
)


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError("set_sync_debug_mode() was called: synchronizing operations would go unseen")
