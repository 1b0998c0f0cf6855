"""Memory that two streams use with no order between them. A vector clock for each stream records the work before it;
every storage remembers its last accesses. An operation that is not seen may hide a collision but never causes a false
report, so no wait may be missed: everything that might make the host or a stream wait counts as a wait, and two
accesses collide only if they surely touch the same byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_on_cpu.accesses import Access, Span, surely_meet
from cuda_on_cpu.arriving_copies import ArrivingCopies
from cuda_on_cpu.errors import EmulationError
from cuda_on_cpu.pending_copies import PendingCopies
from cuda_on_cpu.private import StorageWeakRef, in_backward, is_gone, weak_reference
from cuda_on_cpu.sites import Site, Spot, author_site, author_spot, site_of
from cuda_on_cpu.stream_state import DEFAULT_STREAM_HANDLE, Clock

_MOST_ACCESSES = 64
_MOST_STORAGES = 4096
_MOST_STREAMS = 64
_SEVERAL_THREADS = -1
_ROUNDED = 512
"""Bytes to which torch's allocator rounds sizes: freed memory is reused for the next tensor of the same rounded
size."""
_MOST_LENT = 64


class _Past(NamedTuple):
    """An access: stream, epoch, operation and place in the program."""

    access: Access
    stream: int
    epoch: int
    what: str
    place: Spot | Site
    freed: bool = False
    """True for an access to memory that was freed and now belongs to another tensor."""


class _History:
    """Accesses to one storage."""

    __slots__ = ("owner", "past", "recorded", "size", "weak")

    def __init__(self, storage: torch.UntypedStorage, owner: int | None) -> None:
        self.weak: StorageWeakRef = weak_reference(storage)
        self.size = -(-storage.nbytes() // _ROUNDED)
        self.owner = owner
        """The stream on which the memory was allocated; None if another memory pool owns it."""
        self.recorded: set[int] = set()
        """Streams whose work its allocator waits for, by `record_stream`."""
        self.past: dict[tuple[Access, int], _Past] = {}


class StreamOrder:
    """The order of one thread's streams outside of captures, since its program has its own stream. `threads` is the
    number of times that a thread entered the emulation so far, or -1 while several are inside: these may order their
    work in ways that are not seen, so nothing is reported.
    """

    def __init__(
        self, threads: Callable[[], int], catch_up: Callable[[Clock | None], None] = lambda done: None
    ) -> None:
        """`catch_up(work)`: does the late part of work that something waits for; None: all late work."""
        self._threads = threads
        self._catch_up = catch_up
        self._since = threads()
        self._epochs: dict[int, int] = {}
        self._after: dict[int, Clock] = {}
        self._host: Clock = {}
        self._done: Clock = {}
        self._histories: dict[int, _History] = {}
        self._strange: set[int] = set()
        self._owners: dict[int, tuple[StorageWeakRef, int | None]] = {}
        """Owners of memory that does not belong to the default stream, by its start: a stream; None for a graph's
        pool."""
        self._lent: list[_History] = []
        """Memory that streams other than its owner have used."""
        self.copies = PendingCopies()
        self.arrivals = ArrivingCopies()

    def is_strange(self, stream: int) -> None:
        """Note that other code created `stream`: its waits are unknown, so its work counts as ordered with all other
        work."""
        self._strange.add(stream)

    def mark(self, stream: int) -> Clock:
        """All work before the next work of `stream`, its own so far included."""
        epoch, clock = self._epochs.get(stream, 1), self._clock(stream)
        self._epochs[stream] = epoch + 1
        _join(clock, self._host)
        return {**clock, stream: epoch}

    def epoch(self, stream: int) -> int:
        """The epoch of the next work of `stream`."""
        return self._epochs.get(stream, 1)

    @contextlib.contextmanager
    def as_of(self, stream: int, epoch: int, clock: Clock) -> Iterator[None]:
        """Record work of `stream` as of the time when it was issued: its epoch, and the work before it."""
        now = self.epoch(stream), self._clock(stream)
        self._epochs[stream], self._after[stream] = epoch, dict(clock)
        try:
            yield
        finally:
            epoch, clock = now
            _join(clock, self._after.get(stream, {}))
            self._epochs[stream], self._after[stream] = max(epoch, self.epoch(stream)), clock

    def comes_after(self, stream: int) -> Clock:
        """The work of other streams before the next work of `stream`."""
        return dict(self._clock(stream))

    def wait(self, stream: int, work: Clock) -> None:
        """Order the next work of `stream` after `work`."""
        self._catch_up({other: epoch for other, epoch in work.items() if other != stream})
        _join(self._clock(stream), work)

    def host_waits(self, work: Clock) -> None:
        """Order all later launches after `work`. Raises EmulationError like ``PendingCopies.settle``."""
        self._catch_up(work)
        _join(self._host, work)
        self._lent.clear()  # a device has long done what this program has dropped before a wait
        self.arrivals.arrive(self._host)
        self._settle()

    def host_knows(self, work: Mapping[int, int]) -> bool:
        """True if the host has waited for all of ``work``."""
        return all(
            self._host.get(stream, 0) >= count or self._done.get(stream, 0) > count for stream, count in work.items()
        )

    def host_waits_for(self, stream: int) -> None:
        """Order all later launches after the present work of `stream`."""
        self.host_waits(self.mark(stream))

    def device_waited_for(self) -> None:
        """Note that the host waited for all streams. Raises EmulationError like ``PendingCopies.settle``."""
        self.all_done()
        self._settle()

    def all_done(self) -> None:
        """Forget the order of earlier work, which no longer matters."""
        self._catch_up(None)
        self.arrivals.arrive()
        self._done = dict(self._epochs)
        for history in self._histories.values():
            history.past.clear()
        for forgotten in (self._histories, self._after, self._host):
            forgotten.clear()
        self._lent.clear()

    def holds_back(self, target: Tensor, before: bytes, stream: int, what: str) -> None:
        """Hold back a non-blocking copy to the host; called after it with the result of ``ArrivingCopies.before``.

        Call it with function modes off.
        """
        self.arrivals.hold(target, before, stream, self._epochs.get(stream, 1), what)
        self.copies.device_writes(target.data_ptr(), target.data_ptr() + len(before))

    def holds_back_at(self, storage: StorageWeakRef, first: int, before: bytes, stream: int, what: str) -> None:
        """Hold back a replay's copy to the memory of `storage` from the address `first` on."""
        self.arrivals.hold_at(storage, first, before, stream, self._epochs.get(stream, 1), what)
        self.copies.device_writes(first, first + len(before))

    def host_touches(self, access: Access, what: str) -> None:
        """Note that the host reads or writes memory. Raises EmulationError like ``ArrivingCopies.refuse``."""
        if self.arrivals.pending and not self._may_be_ordered_unseen():
            self.arrivals.refuse(access, what)

    def knows(self, storage: torch.UntypedStorage) -> None:
        """Note a storage: accesses to its addresses count as accesses to this memory, through whatever tensors."""
        self._history(storage)

    def touch(self, storage: torch.UntypedStorage, access: Access, stream: int, what: str) -> None:
        """Note that work of `stream` touches memory. Raises EmulationError if another stream's work does too, and
        neither waits."""
        if stream in self._strange:
            self.all_done()
        else:
            self._touch(self._history(storage), access, stream, what)

    def touch_address(self, start: int, access: Access, stream: int, what: str) -> None:
        """Note an access to the storage that starts at `start`; do nothing if it is unknown."""
        history = self._histories.get(start)
        if history is not None and not is_gone(history.weak) and stream not in self._strange:
            self._touch(history, access, stream, what)

    def allocated(self, storage: torch.UntypedStorage, stream: int) -> None:
        """Note new memory of `stream`: on a device it may be freed memory that another stream still uses. Accesses of
        that stream then count as accesses to the new memory.
        """
        if stream != DEFAULT_STREAM_HANDLE:
            self.owned_by(storage, stream)
        history = self._history(storage)
        for freed in [each for each in self._lent if is_gone(each.weak)]:
            late = [old for old in freed.past.values() if self._is_late(freed, old)]
            fits = freed.owner == stream and freed.size == history.size
            if not late or fits:
                self._lent.remove(freed)
            if late and fits:
                first = storage.data_ptr()
                for old in late:
                    access = Access(first, first + storage.nbytes(), Span.ALL, old.access.writes)
                    history.past[access, old.stream] = old._replace(access=access, freed=True)
                return

    def owned_by(self, storage: torch.UntypedStorage, owner: int | None) -> None:
        """Note memory of a stream; None: of a graph's pool, which no eager program reuses."""
        if len(self._owners) >= _MOST_STORAGES:
            self._owners = {start: each for start, each in self._owners.items() if not is_gone(each[0])}
        self._owners[storage.data_ptr()] = weak_reference(storage), owner

    def _owner_of(self, storage: torch.UntypedStorage) -> int | None:
        weak, owner = self._owners.get(storage.data_ptr(), (None, None))
        return (
            owner if weak is not None and weak.cdata == storage._cdata and not is_gone(weak) else DEFAULT_STREAM_HANDLE
        )

    def recorded(self, storage: torch.UntypedStorage, stream: int) -> None:
        """`record_stream`: freed memory is not reused before the work of `stream`."""
        self._history(storage).recorded.add(stream)

    def _is_late(self, freed: _History, old: _Past) -> bool:
        """True if `old` may not be done when the stream that owns the memory uses it again."""
        assert freed.owner is not None
        return old.stream not in freed.recorded and not self._comes_after(freed.owner, old)

    def _clock(self, stream: int) -> Clock:
        clock = self._after.get(stream)
        if clock is None:
            if len(self._after) >= _MOST_STREAMS:
                # A clock is as long as there are streams, and nobody says when one is gone.
                self.all_done()
            clock = self._after[stream] = {}
        return clock

    def _comes_after(self, stream: int, old: _Past) -> bool:
        known = max(self._clock(stream).get(old.stream, 0), self._host.get(old.stream, 0))
        return old.stream == stream or known >= old.epoch

    def _history(self, storage: torch.UntypedStorage) -> _History:
        start = storage.data_ptr()
        history = self._histories.get(start)
        if history is None or history.weak.cdata != storage._cdata or is_gone(history.weak):
            if len(self._histories) >= _MOST_STORAGES:
                self._forget_what_is_gone()
            history = self._histories[start] = _History(storage, self._owner_of(storage))
        return history

    def _forget_what_is_gone(self) -> None:
        self._histories = {start: each for start, each in self._histories.items() if not is_gone(each.weak)}
        if len(self._histories) >= _MOST_STORAGES:
            self._histories.clear()

    def _touch(self, history: _History, access: Access, stream: int, what: str) -> None:
        self._clock(stream)
        past = history.past
        for old in past.values():
            if not self._comes_after(stream, old) and _collide(old.access, access):
                if self._may_be_ordered_unseen():
                    break
                raise _reused(old, access, what) if old.freed else _race(old, access, what)
        if access.writes:
            for key in [key for key, old in past.items() if self._stands_for(access, stream, old)]:
                del past[key]
        if len(past) >= _MOST_ACCESSES:
            del past[next(iter(past))]
        # Behind all others: the first of them is the oldest.
        past.pop((access, stream), None)
        if history.owner not in (None, stream) and history not in self._lent:
            del self._lent[: len(self._lent) + 1 - _MOST_LENT]
            self._lent.append(history)
        past[access, stream] = _Past(access, stream, self._epochs.get(stream, 1), what, author_spot())

    def _stands_for(self, access: Access, stream: int, old: _Past) -> bool:
        """True if every access that collides with `old` also collides with a later write."""
        return (
            self._comes_after(stream, old)
            and access.first <= old.access.first
            and old.access.end <= access.end
            and access.span is Span.ALL
        )

    def _settle(self) -> None:
        if self._may_be_ordered_unseen():
            self.copies.forget()
        self.copies.settle()

    def _may_be_ordered_unseen(self) -> bool:
        """True if another thread or torch may order work unseen: a backward pass waits for the streams of its
        forward."""
        now, before = self._threads(), self._since
        self._since = now
        unseen = now == _SEVERAL_THREADS or now != before or in_backward()
        if unseen:
            self.all_done()
        return unseen


def _join(clock: Clock, work: Clock) -> None:
    for stream, epoch in work.items():
        if clock.get(stream, 0) < epoch:
            clock[stream] = epoch


def _collide(old: Access, new: Access) -> bool:
    return (old.writes or new.writes) and surely_meet(old, new)


def _race(old: _Past, access: Access, what: str) -> EmulationError:
    does, did = ("writes" if access.writes else "reads"), ("wrote" if old.access.writes else "read")
    return EmulationError(
        what,
        author_site(),
        f"it {does} memory that {old.what} at {site_of(old.place)} {did} on another stream, and nothing orders the two:"
        " the two run in any order, and the result is that of either",
        "let the later stream wait for the earlier one: current_stream().wait_stream(side), or an event",
    )


def _reused(old: _Past, access: Access, what: str) -> EmulationError:
    does, did = ("writes" if access.writes else "reads"), ("writes" if old.access.writes else "reads")
    return EmulationError(
        what,
        author_site(),
        f"it {does} memory that may have been that of a tensor which {old.what} at {site_of(old.place)} {did} on"
        " another stream: that tensor was freed before its own stream waited for the other one, and the allocator gave"
        " its memory away",
        "call tensor.record_stream(side) before the tensor is dropped, or let its stream wait for the other one first",
    )
