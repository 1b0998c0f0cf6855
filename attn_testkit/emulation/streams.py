"""Streams and events. Everything runs in order on a CPU, so all they do is keep account: which streams belong to a
capture, and whether the stream that started it has waited for all their work."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

from attn_testkit.emulation import rules, session
from attn_testkit.emulation.errors import CaptureError
from attn_testkit.emulation.sites import Site, author_site

if TYPE_CHECKING:
    from attn_testkit.emulation.graph import EmulatedGraph

_handles = itertools.count(0x1000, 0x10)
Clock = dict[int, int]
_CUDA = torch.device("cuda", 0)


def _merge(into: Clock, other: Clock) -> None:
    for stream, work in other.items():
        into[stream] = max(into.get(stream, 0), work)


class Stream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.cuda_stream = next(_handles)
        self.stream_id = self.cuda_stream
        self.device = _CUDA
        self.device_index = 0
        self.device_type = 1
        self.priority = priority
        self.capture: EmulatedGraph | None = None
        self.seen: Clock = {}  # the capture's work, by stream, that this stream comes after
        self._outer: list[Stream] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)

    def __enter__(self) -> Stream:
        current = session.require()
        self._outer.append(current.stream)
        current.stream = self
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
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        session.require().refuse(rules.STREAM_WAIT, "Stream.synchronize()")

    def query(self) -> bool:
        if self.capture is not None:
            session.require().refuse(rules.HOST_WAIT, "Stream.query()")
        return True

    @property
    def capturing(self) -> bool:
        return self.capture is not None and self.capture is session.require().capture

    def note_work(self) -> None:
        """One more recorded operation on this stream."""
        self.seen[self.cuda_stream] = self.seen.get(self.cuda_stream, 0) + 1


class ExternalStream(Stream):
    """Stands in for `torch.cuda.ExternalStream`."""

    def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
        super().__init__()
        self.cuda_stream = stream_ptr


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self.external = external
        self.stream: Stream | None = None
        self.capture: EmulatedGraph | None = None
        self.seen: Clock = {}
        self.cuda_event = 0
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or session.require().stream
        self.capture = self.stream.capture if self.stream.capturing else None
        self.seen = dict(self.stream.seen)
        self.cuda_event = self.cuda_event or next(_handles)
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        current = session.require()
        waiting = stream or current.stream
        if self.stream is None or self.stream is waiting:
            return
        if self.capture is not None and self.capture is current.capture:
            if waiting.cuda_stream == DEFAULT_STREAM_HANDLE:
                current.refuse(rules.LEGACY_STREAM, "wait of the default stream")
            self.capture.join(waiting)
            _merge(waiting.seen, self.seen)
        elif waiting.capturing and not self.external:
            current.refuse(rules.OUTSIDE_WORK, "wait for an event of a stream outside the capture")

    def query(self) -> bool:
        if self.capture is not None:
            session.require().refuse(rules.HOST_WAIT, "Event.query()")
        return True

    def synchronize(self) -> None:
        if self.stream is not None:
            session.require().refuse(rules.HOST_WAIT, "Event.synchronize()")

    def elapsed_time(self, end: Event) -> float:
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return (end._time - self._time) * 1e3

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


class StreamContext:
    """Stands in for `torch.cuda.stream(s)`; None means: stay where you are."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


def check_joined(origin: Stream, others: list[tuple[Stream, Site]]) -> CaptureError | None:
    """The error for a side stream whose work the capturing stream never waited for."""
    for stream, site in others:
        if stream.seen.get(stream.cuda_stream, 0) > origin.seen.get(stream.cuda_stream, 0):
            return CaptureError(
                "the end of the capture",
                site if site.line else author_site(),
                "CUDA would refuse with 'capture contains a fork that was not joined': work on a side stream that the"
                " capturing stream does not wait for",
                "torch.cuda.current_stream().wait_stream(side) before the capture ends",
            )
    return None


DEFAULT_STREAM_HANDLE = 0


def default_stream() -> Stream:
    """A stream that stands for the device's default one."""
    stream = Stream()
    stream.cuda_stream = stream.stream_id = DEFAULT_STREAM_HANDLE
    return stream
