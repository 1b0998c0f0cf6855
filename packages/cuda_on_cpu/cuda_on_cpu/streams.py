"""Streams and events with the API of `torch.cuda`. Everything runs in order on a CPU, so they only record which streams
belong to a capture, and whether the stream that started it has waited for all their work."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from cuda_on_cpu import rules, session
from cuda_on_cpu.errors import CaptureError
from cuda_on_cpu.sites import author_site
from cuda_on_cpu.stream_order import StreamOrder
from cuda_on_cpu.stream_state import DEFAULT_STREAM_HANDLE, CaptureStreams, Clock, StreamState

_handles = itertools.count(0x1000, 0x10)
_CUDA = torch.device("cuda", 0)


class Stream(StreamState):
    """The emulated `torch.cuda.Stream`. `priority` is accepted and has no effect."""

    def __init__(self, device: Any = None, priority: int = 0, *, counts: bool = True, **_: Any) -> None:
        super().__init__(next(_handles), counts)
        current = session.current()
        if current is not None:
            current.meet(self)
        self.stream_id = self.cuda_stream
        self.device = _CUDA
        self.device_index = 0
        self.device_type = 1
        self.priority = priority
        self._outer: list[StreamState] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """(least, greatest) priority."""
        return (0, -5)

    def __enter__(self) -> Stream:
        current = session.require()
        self._outer.append(current.stream)
        current.use(self)
        return self

    def __exit__(self, *_: object) -> None:
        session.require().stream = self._outer.pop()

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device=cuda:0 cuda_stream={self.cuda_stream:#x}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, a new one if None, after the work issued on this stream so far; returns it."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Order the next work of this stream after `event`. Raises CaptureError as `Event.wait` does."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Order the next work of this stream after all work of `stream`. Raises CaptureError as `Event.wait` does."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """A host sync: raises CaptureError in a capture, HostSyncError under sync debug mode "error"."""
        current = session.require()
        current.refuse(rules.STREAM_WAIT, "Stream.synchronize()")
        if current.order is not None:
            current.order.host_waits_for(self.cuda_stream)

    def is_capturing(self) -> bool:
        """True if work issued on this stream now becomes part of a graph."""
        current = session.current()
        return current is not None and current.captures(self.capture)

    def query(self) -> bool:
        """True: all work is done. Raises CaptureError for a stream that belongs to a capture."""
        if self.capture is not None:
            session.require().refuse(rules.HOST_WAIT, "Stream.query()")
        current = session.current()
        if current is not None and current.order is not None:
            current.order.host_waits_for(self.cuda_stream)
        return True


class ExternalStream(Stream):
    """The emulated `torch.cuda.ExternalStream`: another object for the stream with the handle `stream_ptr`."""

    def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
        super().__init__(counts=False)
        self.cuda_stream = stream_ptr
        self.counts, self.foreign = stream_ptr != DEFAULT_STREAM_HANDLE, True


class Event:
    """The emulated `torch.cuda.Event`. A wait for an `external` one is never refused."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self.external = external
        self.stream: StreamState | None = None
        self.capture: CaptureStreams | None = None
        self.seen: Clock = {}
        self.work: Clock = {}
        self.cuda_event = 0
        self._asked = True
        self._time = 0.0

    def record(self, stream: StreamState | None = None) -> None:
        """Mark the work issued so far on `stream`, the current one if None."""
        current = session.require()
        current.before = None
        self.stream = stream or current.stream
        self.capture = self.stream.capture if current.captures(self.stream.capture) else None
        self.seen = dict(self.stream.seen)
        account = current.order if self.capture is None else _branches(current)
        if account is not None:
            self.work = account.mark(self.stream.cuda_stream)
        self._asked = False
        self.cuda_event = self.cuda_event or next(_handles)
        self._time = time.perf_counter()

    def wait(self, stream: StreamState | None = None) -> None:
        """Order the next work of `stream` (the current one if None) after this event; nothing if it was never recorded.

        In a capture the waiting stream joins it. Raises CaptureError if that is the default stream, or if a stream of
        the capture waits for work outside it.
        """
        current = session.require()
        current.before = None
        waiting = stream or current.stream
        if self.stream is None or self.stream is waiting:
            return
        account = current.order if self.capture is None else _branches(current)
        if account is not None:
            account.wait(waiting.cuda_stream, self.work)
        if self.capture is not None and current.captures(self.capture):
            if waiting.cuda_stream == DEFAULT_STREAM_HANDLE:
                current.refuse(rules.LEGACY_STREAM, "wait of the default stream")
            self.capture.join(waiting, author_site())
            waiting.come_after(self.seen)
        elif current.captures(waiting.capture) and not self.external:
            current.refuse(rules.OUTSIDE_WORK, "wait for an event of a stream outside the capture")

    def query(self) -> bool:
        """True: the marked work is done, unless the device is late. Raises CaptureError in a capture for an event
        recorded in it."""
        if self.capture is not None:
            session.require().refuse(rules.HOST_WAIT, "Event.query()")
        current = session.current()
        asked, self._asked = self._asked, True
        if current is not None and not current.says_done(self.work, asked):
            return False
        self._host_knows()
        return True

    def synchronize(self) -> None:
        """A host sync, unless never recorded: raises CaptureError in a capture."""
        if self.stream is not None:
            session.require().refuse(rules.HOST_WAIT, "Event.synchronize()")
            self._host_knows()

    def _host_knows(self) -> None:
        current = session.current()
        if current is not None and current.order is not None and self.capture is None:
            current.order.host_waits(self.work)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of host time between the two records. Raises ValueError unless both have timing enabled."""
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        self._host_knows()  # torch raises for an event that is not done
        end._host_knows()
        return (end._time - self._time) * 1e3

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


def _branches(current: session.Session) -> StreamOrder | None:
    return None if current.capture is None else current.capture.order


class StreamContext:
    """The emulated `torch.cuda.stream(s)`; None means the current stream."""

    def __init__(self, stream: StreamState | None) -> None:
        self.stream = stream
        self._outer: list[StreamState] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            current = session.require()
            self._outer.append(current.stream)
            current.use(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            session.require().stream = self._outer.pop()


def fork_error(streams: CaptureStreams) -> CaptureError | None:
    """The error for a side stream whose work the capturing stream never waited for; None if there is none."""
    site = streams.unjoined()
    if site is None:
        return None
    return CaptureError(
        "the end of the capture",
        site if site.line else author_site(),
        "CUDA would refuse with 'capture contains a fork that was not joined': work on a side stream that the"
        " capturing stream does not wait for",
        "torch.cuda.current_stream().wait_stream(side) before the capture ends",
    )


def orderly_stream() -> Stream:
    """A stream whose owner orders it with the default one: it does not start the tracking of streams, which costs some
    microseconds per operation. The tracking includes this stream if the program has another one.
    """
    return Stream(counts=False)


def default_stream() -> Stream:
    """A stream that represents the device's default one, with handle 0."""
    stream = Stream(counts=False)
    stream.cuda_stream = stream.stream_id = DEFAULT_STREAM_HANDLE
    return stream
