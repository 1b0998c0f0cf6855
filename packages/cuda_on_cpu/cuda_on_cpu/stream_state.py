"""State of one stream, and the streams of one capture: plain state, without the API of torch. Work runs in order on a
CPU, so it is enough to record, for every stream of a capture, the recorded work before it.
"""

from __future__ import annotations

from cuda_on_cpu.sites import Site

Clock = dict[int, int]
"""Number of recorded operations by the handle of their stream."""

DEFAULT_STREAM_HANDLE = 0


class StreamState:
    """One stream: its handle, the capture it belongs to, if any, and the part of that capture's work before it.
    `counts`: the program has its own streams, between which it must keep order. `foreign`: other code may have created
    it.
    """

    def __init__(self, handle: int, counts: bool = True) -> None:
        self.cuda_stream = handle
        self.counts = counts
        self.foreign = False
        self.capture: CaptureStreams | None = None
        self.seen: Clock = {}

    def note_work(self) -> None:
        """Count one more recorded operation on this stream."""
        self.seen[self.cuda_stream] = self.seen.get(self.cuda_stream, 0) + 1

    def come_after(self, work: Clock) -> None:
        """Order the next work of this stream after `work`."""
        for stream, count in work.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)


class CaptureStreams:
    """The streams of one capture: the one that began it, and those that waited for its work since."""

    def __init__(self, origin: StreamState) -> None:
        self.origin = origin
        self._joined: list[tuple[StreamState, Site]] = []
        origin.capture, origin.seen = self, {}

    def join(self, stream: StreamState, site: Site) -> None:
        """Note that `stream` waited, at `site`, for captured work: its next work belongs to the capture."""
        if stream.capture is not self:
            stream.capture, stream.seen = self, {}
            self._joined.append((stream, site))

    def unjoined(self) -> Site | None:
        """Place where a side stream joined the capture, of the first stream for whose work the origin never waited."""
        for stream, site in self._joined:
            if stream.seen.get(stream.cuda_stream, 0) > self.origin.seen.get(stream.cuda_stream, 0):
                return site
        return None

    def release(self) -> None:
        """The capture ended: its streams belong to none."""
        for stream in (self.origin, *(stream for stream, _ in self._joined)):
            stream.capture, stream.seen = None, {}
