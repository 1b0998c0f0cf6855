"""Detection of host syncs while a backend plans and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch

from .compilers import while_compilers_work


@contextmanager
def host_syncs_forbidden(forbidden: bool = True, worked: Callable[[str], object] = lambda work: None) -> Iterator[None]:
    """Raise ``RuntimeError`` for any operation inside the block that makes the host wait for the device.

    Disabling this detection raises too: otherwise a plan could disable it, wait, and enable it again. A compiler or
    tuner inside the block may wait: it does so once per kernel, and if it is refused it abandons the kernel for good.
    ``worked`` is called with each, also if waits are not ``forbidden``.
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
