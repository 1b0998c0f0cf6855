"""State of one thread's emulation, and the operations that it refuses."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from cuda_on_cpu.accesses import access_of
from cuda_on_cpu.capture import Capture
from cuda_on_cpu.errors import CaptureError, EmulationError, HostSyncError, spell
from cuda_on_cpu.late_work import LateWork
from cuda_on_cpu.policy import Policy
from cuda_on_cpu.private import StorageWeakRef, disable_functions, disable_modes
from cuda_on_cpu.rule import Rule
from cuda_on_cpu.sites import author_site
from cuda_on_cpu.stream_order import StreamOrder
from cuda_on_cpu.stream_state import CaptureStreams, StreamState
from cuda_on_cpu.tags import is_device, tag_pinned

SYNC_DEFAULT, SYNC_WARN, SYNC_ERROR = 0, 1, 2


class FunctionMode(Protocol):
    """The torch API as this thread's program calls it; `functions.DeviceFunctions` is the only one."""

    def __enter__(self) -> object:
        """Start to see every call of the torch API."""

    def __exit__(self, *_: Any) -> object:
        """Stop to see calls."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func` on the memory that its arguments name, without the rules of `crossings`."""

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func` and see every operation below it."""


class Session:
    """The emulation of one thread, from its outermost `emulated_cuda()` to the end of it.

    `capture` is the capture in progress, if any; `stream` the current one; `capture_stream` the default stream of
    torch.cuda.graph. `called` is the function of torch that the author called, in case an error needs it.
    `creating`: operations without tensor arguments make device memory now. `lenient`: the CPU kernel that runs now
    checks values on the host and the CUDA one does not, so reading them is not an error. `order`: the order of
    streams, kept once the program has its own stream or pinned memory; `handles` are those of streams that it
    created. `scratch`: addresses for which programs of a kernel may race, by the identity of their storage.
    `extents`: memory that a kernel may not leave once it has a pointer into it: for each storage, by its first
    address, the address after the last byte of each part by that of the first. `launched`: called with each launch
    of a Triton kernel. `before`: the stream of the last launch of a Triton kernel, and the memory that it uses; None
    once anything else was launched or waited for. `late`: work that side streams have not begun.
    """

    __slots__ = (
        "_abandon",
        "_threads",
        "before",
        "called",
        "capture",
        "capture_stream",
        "creating",
        "default_stream",
        "extents",
        "function_mode",
        "handles",
        "late",
        "launched",
        "lenient",
        "order",
        "policy",
        "scratch",
        "stream",
        "sync_mode",
    )

    function_mode: FunctionMode

    def __init__(
        self,
        policy: Policy,
        default_stream: StreamState,
        capture_stream: StreamState,
        threads: Callable[[], int] = lambda: 1,
    ) -> None:
        self.policy = policy
        self._threads = threads
        self.order: StreamOrder | None = None
        self.launched: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None
        self.scratch: dict[int, list[tuple[int, int]]] = {}
        self.extents: dict[int, tuple[StorageWeakRef, dict[int, int]]] = {}
        self.before: tuple[int, Any] | None = None
        self.handles = {default_stream.cuda_stream, capture_stream.cuda_stream}
        self.stream = self.default_stream = default_stream
        self.capture_stream = capture_stream
        self.capture: Capture | None = None
        self.creating = False
        self.lenient = False
        self.called: Any = None
        self.sync_mode = SYNC_DEFAULT
        self._abandon: Callable[[], None] | None = None
        self.late = LateWork()
        if policy.late:
            self.keep_order()

    def meet(self, stream: StreamState) -> None:
        """Note that the program uses `stream`; the first stream that counts starts the order of streams."""
        if stream.counts:
            self.keep_order()
        if not stream.foreign:
            self.handles.add(stream.cuda_stream)
        elif self.order is not None and stream.cuda_stream not in self.handles:
            self.order.is_strange(stream.cuda_stream)

    def keep_order(self) -> None:
        """Start to track the order of streams and of copies from pinned memory."""
        if self.order is None:
            self.order = StreamOrder(self._threads, self.late.catch_up)
            if self.capture is not None:
                self.capture.order = self.new_account()

    @property
    def is_late(self) -> bool:
        """True if work that is issued now may be done later."""
        late = self.policy.side_streams == "late" and self.order is not None and self.capture is None
        return late and self.stream is not self.default_stream

    def delays(self, work: Callable[[], object]) -> bool:
        """Postpone work that has no result, if the current stream is late; False if it must be done now."""
        stream, order = self.stream, self.order
        if order is None or not self.is_late:
            self.late.catch_up_on(stream.cuda_stream)
            return False
        handle = stream.cuda_stream
        epoch, clock = order.epoch(handle), order.comes_after(handle)

        def run() -> None:
            before, self.stream = self.stream, stream
            try:
                with torch.inference_mode(), disable_modes(), disable_functions(), order.as_of(handle, epoch, clock):
                    work()
            finally:
                self.stream = before

        self.late.add(handle, epoch, run)
        return True

    def new_account(self) -> StreamOrder:
        """A new, empty order of streams."""
        return StreamOrder(self._threads)

    def pin(self, tensor: Tensor) -> Tensor:
        """Make the memory of a new host tensor pinned; returns the tensor."""
        self.keep_order()
        return tag_pinned(tensor)

    def begins_copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Note a copy between host and device on the current stream. Raises EmulationError like
        ``PendingCopies.add``."""
        order = self.keeps_order
        if order is not None and non_blocking and is_device(target) and not is_device(source):
            self.device_uses(source)
            order.copies.add(target, source, self.operation or "Tensor.copy_")

    def device_uses(self, tensor: Tensor) -> None:
        """Note that the device reads or writes host memory, which must be pinned."""
        order = self.keeps_order
        access = access_of(tensor, False) if order is not None and order.arrivals.pending else None
        if order is not None and access is not None:
            order.arrivals.arrive_in(access)

    def host_reads(self, tensor: Tensor) -> None:
        """Note that the host reads its memory. Raises EmulationError if a copy to it may not have been made."""
        order = self.keeps_order
        access = access_of(tensor, False) if order is not None and order.arrivals.pending else None
        if order is not None and access is not None:
            order.host_touches(access, self.operation)

    def copies_to_host(self, target: Tensor, copy: Callable[[], object]) -> None:
        """Make a non-blocking copy to the host; its bytes are held back until the host waits.

        Call it with function modes off.
        """
        order = self.keeps_order
        before = None if order is None else order.arrivals.before(target)
        copy()
        if order is not None and before is not None:
            order.holds_back(target, before, self.stream.cuda_stream, self.operation or "Tensor.copy_")

    def says_done(self, work: Mapping[int, int], asked: bool) -> bool:
        """True if `query()` returns that work is done: on a late device the first query returns False."""
        late = self.policy.late and not asked and self.order is not None and not self.order.host_knows(work)
        return not late

    def use(self, stream: StreamState) -> None:
        """Make `stream` the current one."""
        self.stream = stream
        self.meet(stream)

    @property
    def keeps_order(self) -> StreamOrder | None:
        """The order of streams for the present work: None in a capture, where nothing runs."""
        return self.order if self.capture is None else None

    @property
    def account(self) -> StreamOrder | None:
        """The order of streams for the memory of the present work: in a capture, that of its branches."""
        if self.capture is None:
            return self.order
        return self.capture.order if self.recording else None

    def allocates(self, tensor: Tensor) -> None:
        """Note new device memory of the current stream."""
        if self.order is not None and self.capture is not None:
            self.order.owned_by(tensor.untyped_storage(), None)
        elif self.order is not None:
            self.order.allocated(tensor.untyped_storage(), self.stream.cuda_stream)

    def touch(self, tensor: Tensor, *, writes: bool = False, what: str = "") -> None:
        """Note that the current stream reads or writes a tensor, if that is device memory. Raises EmulationError for a
        race.

        Call it with function modes off.
        """
        order = self.account
        access = access_of(tensor, writes) if order is not None and is_device(tensor) else None
        if order is not None and access is not None:
            order.touch(tensor.untyped_storage(), access, self.stream.cuda_stream, what or self.operation)

    def host_waits(self) -> None:
        """Note that the host waits for the current stream, outside of a capture."""
        order = self.keeps_order
        if order is not None:
            order.host_waits_for(self.stream.cuda_stream)

    def begin_capture(self, capture: Capture, abandon: Callable[[], None]) -> None:
        """Start to record into `capture`. `abandon` ends it if the program leaves the emulation before it ends the
        capture."""
        self.capture, self._abandon = capture, abandon

    def end_capture(self) -> None:
        """Stop recording."""
        self.capture = self._abandon = None

    def abandon_capture(self) -> None:
        """End and forget the capture in progress, if there is one."""
        if self._abandon is not None:
            self._abandon()

    def captures(self, streams: CaptureStreams | None) -> bool:
        """True if `streams` are those of the capture in progress."""
        return streams is not None and self.capture is not None and self.capture.streams is streams

    @property
    def recording(self) -> bool:
        """True if work issued now is recorded: the current stream belongs to the capture in progress."""
        return self.captures(self.stream.capture)

    @property
    def strict(self) -> bool:
        """True if host syncs matter now: inside a capture, under sync debug mode, or as an order between streams."""
        return self.capture is not None or self.sync_mode != SYNC_DEFAULT or self.order is not None

    @property
    def operation(self) -> str:
        """The call as the author wrote it; empty if none was noted."""
        return "" if self.called is None else spell(self.called)

    def refuse(self, rule: Rule, operation: str = "") -> None:
        """Do what CUDA would if `rule`'s operation happened now.

        Raises CaptureError inside a capture, EmulationError outside for a rule that also applies in eager code, and
        HostSyncError for a wait under `set_sync_debug_mode("error")` (a warning under "warn"). Returns if CUDA would
        let it happen.
        """
        self.before = None
        if self.capture is None and not rule.eager:
            if not rule.says_whom:
                self.host_waits()
            if not (rule.syncs and self.sync_mode):
                return
        what = self._describe(operation)
        if self.capture is not None:
            if rule.invalidates:
                self.capture.failed = True
            raise CaptureError(what, author_site(), rule.cuda, rule.cure)
        if rule.eager:
            raise EmulationError(what, author_site(), rule.cuda, rule.cure)
        reason = f"the host waits for the device ({rule.why}), which sync debug mode reports"
        if self.sync_mode == SYNC_ERROR:
            raise HostSyncError(what, author_site(), reason, rule.cure)
        warnings.warn(f"called a synchronizing CUDA operation: {what} at {author_site()}", stacklevel=2)

    def _describe(self, operation: str) -> str:
        called = self.operation
        return f"{called} ({operation})" if operation and called and operation != called else operation or called


class _Local(threading.local):
    session: Session | None = None


_local = _Local()


def current() -> Session | None:
    """The session of this thread, if it is inside `emulated_cuda()`."""
    return _local.session


def require() -> Session:
    """The session of this thread. Raises RuntimeError outside `emulated_cuda()`."""
    if _local.session is None:
        raise RuntimeError("this emulated torch.cuda only works inside emulated_cuda()")
    return _local.session


def install(session: Session | None) -> None:
    """Make `session` the one of this thread; None: the thread leaves the emulation."""
    _local.session = session


def present_policy() -> Policy | None:
    """The policy of this thread's emulation, with which it can begin in another thread, too; None outside."""
    return None if _local.session is None else _local.session.policy


def is_active() -> bool:
    """True if this thread is inside `emulated_cuda()`."""
    return _local.session is not None
