"""What one thread's emulation knows right now."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

from attn_testkit.emulation.errors import CaptureError, EmulationError, HostSyncError
from attn_testkit.emulation.policy import Policy
from attn_testkit.emulation.sites import author_site

if TYPE_CHECKING:
    from attn_testkit.emulation.graph import EmulatedGraph
    from attn_testkit.emulation.rule import Rule
    from attn_testkit.emulation.streams import Stream

SYNC_DEFAULT, SYNC_WARN, SYNC_ERROR = 0, 1, 2


class Session:
    """The emulation of one thread, from its outermost `emulated_cuda()` to the end of it."""

    __slots__ = (
        "capture",
        "capture_stream",
        "creating",
        "default_stream",
        "function_mode",
        "lenient",
        "operation",
        "policy",
        "stream",
        "sync_mode",
    )

    def __init__(self, policy: Policy, default_stream: Stream, capture_stream: Stream) -> None:
        self.policy = policy
        self.stream = self.default_stream = default_stream
        self.capture_stream = capture_stream  # where torch.cuda.graph captures when it is told no stream
        self.capture: EmulatedGraph | None = None
        self.creating = False  # operations without tensor arguments make device memory now
        self.lenient = False  # the CPU kernel validates values on the host where the CUDA one does not
        self.operation = ""  # the call as the author wrote it
        self.sync_mode = SYNC_DEFAULT
        self.function_mode: Any = None

    def refuse(self, rule: Rule, operation: str = "") -> None:
        """Raise if CUDA would not let `rule`'s operation happen now."""
        what = self._describe(operation)
        if self.capture is not None:
            if rule.invalidates:
                self.capture.failed = True
            raise CaptureError(what, author_site(), rule.cuda, rule.cure)
        if rule.eager:
            raise EmulationError(what, author_site(), rule.cuda, rule.cure)
        if rule.syncs and self.sync_mode:
            reason = f"the host waits for the device ({rule.why}), which sync debug mode reports"
            if self.sync_mode == SYNC_ERROR:
                raise HostSyncError(what, author_site(), reason, rule.cure)
            warnings.warn(f"called a synchronizing CUDA operation: {what} at {author_site()}", stacklevel=2)

    def _describe(self, operation: str) -> str:
        if operation and self.operation and operation != self.operation:
            return f"{self.operation} ({operation})"
        return operation or self.operation

    @property
    def strict(self) -> bool:
        """Whether host syncs matter now, inside a capture or under sync debug mode."""
        return self.capture is not None or self.sync_mode != SYNC_DEFAULT


class _Local(threading.local):
    session: Session | None = None


_local = _Local()


def current() -> Session | None:
    """The session of this thread, if it is inside `emulated_cuda()`."""
    return _local.session


def require() -> Session:
    """The session of this thread; raises outside `emulated_cuda()`."""
    if _local.session is None:
        raise RuntimeError("this torch.cuda stand-in only works inside emulated_cuda()")
    return _local.session


def install(session: Session | None) -> None:
    """Make `session` the one of this thread."""
    _local.session = session


def is_active() -> bool:
    """Whether this thread is inside `emulated_cuda()`."""
    return _local.session is not None
