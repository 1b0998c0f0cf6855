"""The memories of an instance that outlive a step, one for the layers of each family, each with its watch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.checks.observation import Piece
from attn_testkit.contract import BackendContext
from attn_testkit.families.by_layer import make_data, schedule_of
from attn_testkit.families.family import Memory, Watch
from attn_testkit.families.table import families_of
from attn_testkit.steps.data import StepData
from attn_testkit.steps.schedule import Schedule, Step
from attn_testkit.watches.packing import Bytes, bytes_of
from attn_testkit.watches.past_modes import past_modes
from attn_testkit.watches.uploads import upload


@dataclass(frozen=True)
class WatchedMemory:
    """The memory of the layers of one family, and its watch."""

    family: str
    memory: Memory
    watch: Watch
    device: torch.device
    prefix: str
    """First word of the names of its pieces; empty if all layers are of this family."""

    def due(self, data: StepData) -> npt.NDArray[np.int64]:
        """Slots that a step may write: those of its tokens or requests, and slot 0, [n] ascending."""
        # Without np.unique: its first call imports a package, which must not happen during a run.
        return np.array(sorted({0, *self.memory.due(data.parts.get(self.family, data)).tolist()}), dtype=np.int64)

    def load(
        self, schedule: Schedule, step: Step, pattern: str | None, data: StepData, *, unowned: float, tails: bool
    ) -> None:
        """Fill the memory; for a step that continues the last step it keeps its contents, if the family can carry them
        on. ``tails``: page tails are finite."""
        schedule, carry = schedule_of(schedule, self.family), self.memory.carry
        if step.follows is not None and carry is not None:
            before = torch.from_numpy(self.memory.due(make_data(schedule, step.follows, pattern)))
            carry(self.watch, upload(before, self.device), (schedule, step, pattern))
            return
        own, marked = data.parts.get(self.family, data), pattern if pattern and pattern.startswith("place.") else ""

        def held() -> tuple[npt.NDArray[np.int64], Bytes]:
            with past_modes():
                if not (marked or tails):
                    return self.memory.held(schedule, step, own, after=step.stored, unowned=unowned)
                image = self.memory.image(schedule, step, own, tails, after=step.stored, unowned=unowned, marked=marked)
                return np.arange(image.shape[2]), bytes_of(image)

        self.watch.fill((schedule, step, pattern), held, unowned)

    def pieces(self, due: npt.NDArray[np.int64], found: Sequence[Bytes]) -> Iterator[Piece]:
        """Slots that changed, with their contents. ``found``: results of ``Watch.look``."""
        slots, held, shape = self.watch.written(due, found)
        yield Piece("pool", f"{self.prefix}slots", torch.int64, slots.shape, slots.view(np.uint8))
        yield Piece("pool", f"{self.prefix}rows", self.watch.bits, shape, held)
        for name, (dtype, size, raw) in self.memory.noted(self.watch, found).items():
            yield Piece("pool", f"{self.prefix}{name}", dtype, size, raw)
        places = self.watch.outside(found)
        if len(places):
            yield Piece("pool", f"{self.prefix}outside", torch.int64, places.shape, places.view(np.uint8))


def memories_of(context: BackendContext, schedule: Schedule) -> tuple[WatchedMemory, ...]:
    """The memories of an instance whose first schedule is ``schedule``."""
    families = families_of(schedule.case)
    return tuple(
        WatchedMemory(
            each.name,
            each.memory,
            each.memory.watch(context, schedule_of(schedule, each.name)),
            context.device,
            f"{each.name} " if len(families) > 1 else "",
        )
        for each in families
    )
