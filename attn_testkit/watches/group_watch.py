"""The pools of KV groups, watched as one: slots are numbered as in the schedule, wherever they are in a group's
pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..cases.head_shapes import HeadMap
from ..contract import KVGroup
from ..steps.kv_groups import slot_map
from ..steps.schedule import Schedule, Step
from .joined_watch import JoinedWatch
from .packing import Bytes
from .pool_watch import PoolWatch
from .uploads import upload

_Ints = npt.NDArray[np.int64]


class GroupWatch(JoinedWatch):
    """One ``PoolWatch`` per group, with the interface of one for all layers."""

    def __init__(self, groups: Sequence[KVGroup], device: torch.device, maps: Sequence[HeadMap] = ()) -> None:
        """Watch the pools of groups. ``maps``: of all layers, if they differ in heads."""
        turns = len(groups)
        super().__init__([PoolWatch(group.kv_pool, maps[index::turns]) for index, group in enumerate(groups)])
        self._device = device
        self._counts = [len(group.layer_ids) for group in groups]
        self._mapped: Schedule | None = None
        """The schedule whose maps are cached."""
        self._maps: list[_Ints] = []
        """Maps from slots of the schedule to slots of the pool, one per group."""
        self._on_device: list[torch.Tensor] = []

    def _of(self, group: int) -> slice:
        """Layers of a group, among all."""
        return slice(group, None, len(self._watches))

    def fill(
        self,
        name: tuple[Schedule, Step, str | None],
        held: Callable[[], tuple[_Ints, Bytes]],
        unowned: float,
    ) -> None:
        """Do the work of ``PoolWatch.fill``; ``held`` has all layers, and slots of the schedule."""
        if name[0] is not self._mapped:
            self._mapped = name[0]
            self._maps = [slot_map(name[0], group) for group in range(len(self._watches))]
            self._on_device = [upload(torch.from_numpy(found), self._device) for found in self._maps]
        made: list[tuple[_Ints, Bytes]] = []

        def of_group(group: int) -> tuple[_Ints, Bytes]:
            if not made:
                made.append(held())
            slots, rows = made[0]
            return self._maps[group][slots], np.ascontiguousarray(rows.reshape(sum(self._counts), -1)[self._of(group)])

        for group, watch in enumerate(self._watches):
            watch.fill(name, lambda group=group: of_group(group), unowned)  # type: ignore[misc]

    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Do the work of ``PoolWatch.look`` for each group. All have the slots of a schedule, each in another order."""
        return tuple(
            part
            for watch, of_group in zip(self._watches, self._on_device, strict=True)
            for part in watch.look(slots, of_group[due], count)
        )

    def written(self, due: _Ints, found: Sequence[Bytes]) -> tuple[_Ints, Bytes, tuple[int, ...]]:
        """Do the work of ``PoolWatch.written``: slots that changed in any group, with all layers' rows."""
        parts = [
            watch.written(self._maps[group][due], mine) for group, (watch, mine) in enumerate(self._by_pool(found))
        ]
        changed = [np.argsort(self._maps[group])[slots] for group, (slots, _, _) in enumerate(parts)]
        # Without np.unique, as in ``ServerHarness.load``.
        every = np.array(sorted(set(np.concatenate(changed).tolist())), dtype=np.int64)
        shape = (sum(self._counts), parts[0][2][1], len(every), *parts[0][2][3:])
        rows = np.empty((shape[0], math.prod(shape[1:]) * self.bits.itemsize), np.uint8)
        for group in range(len(self._watches)):
            rows[self._of(group)] = self._rows(group, every)
        return every, rows.reshape(-1), shape

    def _rows(self, group: int, slots: _Ints) -> Bytes:
        """Contents of a group's pool in slots of the schedule, [layers of the group, bytes]."""
        watch, mine = self._watches[group], upload(torch.from_numpy(self._maps[group][slots]), self._device)
        _, (now, size), *_ = watch.look(len(self._maps[group]), mine, len(slots))
        raw: Bytes = now[:size].cpu().numpy()
        return watch.whole(raw, len(slots)).reshape(self._counts[group], -1)
