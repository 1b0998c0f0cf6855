"""Known bugs that have no fault here, each with the reason."""

from __future__ import annotations

from .catalogue import LeftOut

__all__ = ["LEFT_OUT"]

_DEVICES_AND_STREAMS = (
    LeftOut(
        "semaphore-keyed-by-device-only",
        "a race of two streams; the drives give a backend one stream, as a server does",
    ),
    LeftOut(
        "kernel-ignores-current-stream",
        "a race with a delayed producer on another stream, which needs real asynchronous kernels",
    ),
    LeftOut("wrong-device-default", "needs two devices"),
    LeftOut("shared-mapping-overwritten-during-replay", "a race between a replay and a scheduler's stream"),
    LeftOut(
        "read-before-producer-visible", "a race inside programmatic dependent launch, which a torch backend has not"
    ),
)
_OTHER_ROOMS = (
    LeftOut("graph-key-missing-query-len", "the key of a server's graph cache: the runner's bug, not a backend's"),
    LeftOut("replay-bucket-recomputed", "the runner slices its static buffers with another bucket than it captured"),
    LeftOut("metadata-built-before-graph-padding", "see metadata-for-live-rows-only, the backend's side of it"),
)

LEFT_OUT: tuple[LeftOut, ...] = _DEVICES_AND_STREAMS + _OTHER_ROOMS
