"""Ranks that communicate: the calls of all ranks run in threads, on torch's own process group of threads.

Each rank has a world of ``torch.distributed`` of its own, whose default group are the ranks. One rank runs at a time.
It lets others run while it waits in a collective, so a rank that never comes is found without a timeout: nobody is left
that could run. torch tests its own collectives on this group (``torch.testing._internal``).
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _set_thread_isolation_mode  # type: ignore[attr-defined]

from attn_testkit.checks.failures import is_foreign
from attn_testkit.environment import device_of_thread

from .errors import MissingRankError

Site = tuple[str, int, str]
"""File, line and function."""
_TIMEOUT = timedelta(seconds=60)
"""Time until torch gives up to make a group for which a rank is missing."""
CURE_OF_RANKS = (
    "every rank of a group has to call the same collectives in the same order, also a rank without rows: decide by "
    "what is equal on all ranks, such as seq_lens, and not by the rank's own rows"
)


@dataclass
class _Rank:
    """State of a rank, and the collective in which it waits."""

    state: str = "ready"
    """``ready``, ``running``, ``waiting`` or ``done``."""
    collective: Any = None
    """The collective in which it waits; None if it makes a group."""
    name: str = ""
    """The function in which it waits."""
    site: Site | None = None
    """The author's line that called it."""
    result: Any = None
    error: BaseException | None = None


@dataclass
class _Turns:
    """Turns of ranks, one of which runs at a time."""

    order: Sequence[int]
    end: Callable[[], None]
    """Ends the waits of all ranks."""
    ranks: list[_Rank] = field(default_factory=list)
    left: MissingRankError | None = None
    """The error if ranks wait for one that does not come."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self.ranks = [_Rank() for _ in self.order]

    def begin(self, rank: int) -> None:
        """Wait until it is the turn of a rank."""
        with self._changed:
            self.ranks[rank].state = "ready"
            self._next()
            self._changed.wait_for(lambda: self.ranks[rank].state == "running")

    def leave(self, rank: int, state: str, collective: Any = None, name: str = "", site: Site | None = None) -> None:
        """Let another rank run, because this one waits or is done."""
        with self._changed:
            mine = self.ranks[rank]
            mine.state, mine.collective, mine.name, mine.site = state, collective, name, site
            self._next()

    def _next(self) -> None:
        if any(each.state == "running" for each in self.ranks):
            return
        ready = next((rank for rank in self.order if self.ranks[rank].state == "ready"), None)
        if ready is not None:
            self.ranks[ready].state = "running"
            self._changed.notify_all()
        elif self.left is None and (waiting := self._waiting_in_vain()):
            self.left = MissingRankError(self._said(waiting), CURE_OF_RANKS, self.ranks[waiting[0]].site)
            self.end()

    def _waiting_in_vain(self) -> list[int]:
        """Ranks that wait in collectives to which no other rank can come; empty if any rank may go on by itself."""
        waiting = [rank for rank, each in enumerate(self.ranks) if each.state == "waiting"]
        held = [self.ranks[rank].collective for rank in waiting]
        # A group that is made, and a collective to which all of its ranks came, go on by themselves.
        if any(each is None or each._done or held.count(each) == each._world_size for each in held):
            return []
        return waiting

    def _said(self, waiting: Sequence[int]) -> str:
        others = [f"rank {rank} returned" for rank, each in enumerate(self.ranks) if each.state == "done"]
        places = [f"rank {rank} waits in {self.ranks[rank].name}{_at(self.ranks[rank].site)}" for rank in waiting]
        return ", ".join([*others, *places])


class RanksAsThreads:
    """Runs the calls of ranks in threads, which may call ``torch.distributed``. The worlds of the ranks stay from call
    to call."""

    def __init__(self, ranks: int) -> None:
        self._worlds: list[Any] = [None] * ranks
        self._store = dist.HashStore()  # type: ignore[attr-defined]

    def __call__(self, calls: Sequence[Callable[[], Any]], order: Sequence[int]) -> list[Any]:
        """Results of ``calls``, one for each rank. ``order``: ranks in the order of their first turns.

        Raises the error of the first rank that raised one, and ``MissingRankError`` for a rank that did not come to a
        collective in which another one waits.
        """
        # Untyped, and not needed before a backend communicates.
        threaded: Any = importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")
        group = threaded.ProcessLocalGroup
        turns = _Turns(order, lambda: group.exception_handle(None))
        enter, grad, inference = device_of_thread(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def run(rank: int) -> None:
            mine = turns.ranks[rank]
            try:
                with enter(), torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    self._join_world(threaded, rank)
                    turns.begin(rank)
                    mine.result = calls[rank]()
            except BaseException as error:
                mine.error = error
                turns.end()
            finally:
                turns.leave(rank, "done")

        with _threaded(threaded, turns):
            threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in order]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            group.reset()
        # Ranks that waited when another one raised, or in vain, end with ``SystemExit``.
        errors = [error for each in turns.ranks if (error := each.error) is not None]
        first = next((error for error in errors if not isinstance(error, SystemExit)), turns.left)
        if first is not None or errors:
            raise first or errors[0]
        return [each.result for each in turns.ranks]

    def _join_world(self, threaded: Any, rank: int) -> None:
        """Make the rank's world the one of this thread."""
        if self._worlds[rank] is None:
            dist.init_process_group(
                "threaded", rank=rank, world_size=len(self._worlds), store=self._store, timeout=_TIMEOUT
            )
            self._worlds[rank] = threaded.ThreadLocalWorld()._get_world()
            return
        threaded.ThreadLocalWorld._world.world = world = self._worlds[rank]
        for group, name in world.pg_names.items():
            _register_process_group(name, group)


@contextmanager
def _threaded(threaded: Any, turns: _Turns) -> Iterator[None]:
    """Use torch's worlds of threads inside the block, in which a rank that waits lets others run."""
    join, barrier = threaded.Collective.join, threaded._store_based_barrier
    of_class, start = vars(threaded.ProcessLocalGroup)["_start_coll"], threaded.ProcessLocalGroup._start_coll

    def joined(collective: Any, rank: int, data: Any) -> Any:
        return _waited(turns, collective, lambda: join(collective, rank, data))

    def started(collective: Any, pg: Any) -> Any:
        found = start(collective, pg)
        if type(found._collective) is not type(collective):
            name, site = _place()
            raise MissingRankError(
                f"rank {_rank()} calls {name}{_at(site)}, and another rank of the group waits in "
                f"{type(found._collective).__name__}",
                CURE_OF_RANKS,
                site,
            )
        return found

    def made(*args: Any, **named: Any) -> Any:
        return _waited(turns, None, lambda: barrier(*args, **named))

    threaded._install_threaded_pg()
    # Names of groups are then those of a thread.
    _set_thread_isolation_mode(True)
    threaded.Collective.join, threaded._store_based_barrier = joined, made
    threaded.ProcessLocalGroup._start_coll = staticmethod(started)
    try:
        yield
    finally:
        threaded.Collective.join, threaded._store_based_barrier = join, barrier
        threaded.ProcessLocalGroup._start_coll = of_class
        _set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()


def _at(site: Site | None) -> str:
    return "" if site is None else f" ({Path(site[0]).name}:{site[1]})"


def _rank() -> int:
    return int(threading.current_thread().name.removeprefix("rank "))


def _waited(turns: _Turns, collective: Any, call: Callable[[], Any]) -> Any:
    """The result of ``call``, in which a rank waits. Before its first turn a rank makes its world."""
    rank = _rank()
    if turns.ranks[rank].state != "running":
        return call()
    turns.leave(rank, "waiting", collective, *_place())
    try:
        return call()
    finally:
        turns.begin(rank)


def _place() -> tuple[str, Site | None]:
    """The collective that is called, and the author's line that calls it."""
    frame: FrameType | None = sys._getframe(2)
    name = "a collective"
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        if frame.f_code.co_name != "wrapper" and frame.f_code.co_filename != __file__:
            name = frame.f_code.co_name
        frame = frame.f_back
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return name, None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


_TORCH = str(Path(torch.__file__).parent)
