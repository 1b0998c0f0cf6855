"""What one step of a backend left behind, on the host, and what it should have.

``Copies`` travel from the process that runs the backend; an ``Observation`` is what the judge makes of them, with a
schedule, a step and inputs of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..cases.data import StepData
from ..cases.schedule import Schedule, Step

__all__ = [
    "Among",
    "Bytes",
    "Copies",
    "Group",
    "Observation",
    "Outputs",
    "Piece",
    "StepInputs",
    "copies_from",
    "copies_of",
]

Bytes = npt.NDArray[np.uint8]

Group = Literal["attention", "activations", "before", "now", "outputs", "pool", "lse", "finite parts", "beside"]
Among = Literal["", "steps", "graphs", "instances", "modes"]
"""What else ran on an instance, or beside it, before an eager run: nothing, other steps, graphs, another instance,
steps of other modes."""


@dataclass(frozen=True)
class Outputs:
    """What the mode returns to its caller, live rows only. A field that the mode does not have is None."""

    next_token_logits: torch.Tensor | None
    """[rows, vocab] float32."""
    hidden_states: torch.Tensor | None
    """[rows, hidden] float32."""
    topk_p: torch.Tensor | None = None
    """[rows, k] float32."""
    topk_index: torch.Tensor | None = None
    """[rows, k] int64."""


@dataclass(frozen=True, eq=False)
class Copies:
    """Host copies of one step, in one piece."""

    flat: Bytes = field(repr=False)
    """All tensors, one after the other."""
    layout: tuple[tuple[Group, str, str, tuple[int, ...], int], ...] = field(repr=False)
    """(group, name, dtype, shape, first byte) of each, in the order in which they lie."""

    def group(self, group: Group) -> dict[str, torch.Tensor]:
        """The tensors of one group by name: views. Empty for a group that there is not."""
        found: dict[str, torch.Tensor] = {}
        # numpy may give an array of nothing a stride of 0, and torch then looks at it as no other dtype.
        whole = torch.from_numpy(self.flat) if len(self.flat) else torch.empty(0, dtype=torch.uint8)
        for of, name, dtype_name, shape, start in self.layout:
            if of == group:
                dtype: torch.dtype = getattr(torch, dtype_name)
                found[name] = whole[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return found

    def cut(self) -> dict[Group, dict[str, torch.Tensor]]:
        """The tensors, by group and name: views."""
        return {group: self.group(group) for group in dict.fromkeys(entry[0] for entry in self.layout)}

    def same(self, one: Group, other: Group) -> bool:
        """Whether two groups hold the same names, dtypes, shapes and bits in the same order."""
        a, b = ([entry for entry in self.layout if entry[0] == group] for group in (one, other))
        if [entry[1:4] for entry in a] != [entry[1:4] for entry in b]:
            return False
        return not a or np.array_equal(self.flat[_span(a)], self.flat[_span(b)])


def _span(entries: list[tuple[Group, str, str, tuple[int, ...], int]]) -> slice:
    """The bytes of neighbours in a layout."""
    _, _, dtype, shape, last = entries[-1]
    return slice(entries[0][4], last + math.prod(shape) * int(getattr(torch, dtype).itemsize))


class Piece(NamedTuple):
    """One tensor of a step, on the host."""

    group: Group
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    raw: Bytes
    """Its bytes."""


def copies_of(tensors: Iterable[tuple[Group, str, torch.Tensor]]) -> Copies:
    """Copies of host tensors."""
    return copies_from(
        Piece(group, name, tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy())
        for group, name, tensor in tensors
    )


def copies_from(pieces: Iterable[Piece]) -> Copies:
    """Copies of all of them, side by side."""
    # What is compared as a whole lies together. Wide elements first, so that a piece stands at a multiple of its size.
    ordered = sorted(pieces, key=lambda piece: (_TOGETHER.get(piece.group, 0), -piece.dtype.itemsize))
    raw: list[Bytes] = []
    layout: list[tuple[Group, str, str, tuple[int, ...], int]] = []
    end, before = 0, ""
    for piece in ordered:
        if piece.group in _TOGETHER and piece.group != before and end % _WIDEST:
            raw.append(_PADDING[end % _WIDEST :])
            end += len(raw[-1])
        layout.append((piece.group, piece.name, str(piece.dtype).removeprefix("torch."), tuple(piece.shape), end))
        raw.append(piece.raw)
        end, before = end + len(piece.raw), piece.group
    return Copies(np.concatenate(raw), tuple(layout))


_TOGETHER: dict[Group, int] = {"before": 1, "now": 2}
_WIDEST = 8
_PADDING = np.zeros(_WIDEST, np.uint8)


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What a step was given, made by the judge from the case: what the backend may not change, and what it should."""

    data: StepData
    """With ``save_kv_cache`` False, ``k`` and ``v`` are NaN."""
    packed: torch.Tensor
    """[T, L, width] in the model's dtype: the rows of the model's table that q, k and v are views of."""
    image: Callable[[bool], torch.Tensor] = field(repr=False)
    """The KV pool before the step or, with True, as it should be after it. Made where somebody asks: it is large."""
    new_slots: torch.Tensor
    """[n] int64, ascending: slots that the step should write. None with ``save_kv_cache`` False."""
    new_rows: torch.Tensor
    """[L, 2 or 1, n, Hk, Dqk] in the pool's dtype: what they should hold."""
    new_limit: torch.Tensor | None = None
    """Float64, likewise: how far each element may be off. None: not at all, they are compared in bits."""


@dataclass(frozen=True)
class Observation:
    """Host copies taken right after a step, and where in its drive the step stood."""

    schedule: Schedule = field(repr=False)
    step: Step
    label: str
    """Empty for a lone eager step, else ``replay 4 of 7 (long beside short), bucket 4, 3 live``."""
    copies: Copies
    among: Among = ""
    """What else ran on the instance before an eager run: nothing, other eager steps, or graphs."""
    damaged: tuple[str, ...] = ()
    """Blocks that were freed after capture and that the replay wrote into."""
    replay: bool = False
    padded: int = 0
    """Padded requests."""
    eager_run: Observation | None = field(default=None, repr=False)
    """The backend's own eager run of the same step, where there was one."""
    inputs: StepInputs | None = field(default=None, repr=False)
    """Set by the judge; None while the step travels, and where its memory is of no interest."""

    @cached_property
    def attention(self) -> tuple[torch.Tensor, ...]:
        """Output of every layer for the live rows, as the backend returned it: [T, Hq, Dv] or [T, Hq * Dv]."""
        return tuple(self.copies.group("attention").values())

    @cached_property
    def outputs(self) -> Outputs:
        """What the mode returns to its caller."""
        found: dict[str, Any] = {"next_token_logits": None, "hidden_states": None}
        return Outputs(**{**found, **self.copies.group("outputs")})

    @cached_property
    def written(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the KV pool that changed, [n] int64 ascending, and their bits now: [L, 2 or 1, n, Hk, Dqk]."""
        pieces = self.copies.group("pool")
        return pieces["slots"], pieces["rows"]

    @cached_property
    def outside(self) -> tuple[int, ...]:
        """Bytes of the pool's memory that belong to no slot and changed, one for each piece of memory that has any."""
        found = self.copies.group("pool").get("outside")
        return () if found is None else tuple(found.tolist())

    @cached_property
    def pool(self) -> torch.Tensor:
        """[L, 2 or 1, slots, Hk, Dqk] in the pool's dtype: the KV pool after the step."""
        assert self.inputs is not None
        pool = self.inputs.image(False).clone()
        slots, rows = self.written
        raw = pool.view(rows.dtype)
        raw[:, :, slots] = rows
        return pool

    @cached_property
    def pool_after(self) -> torch.Tensor:
        """[L, 2 or 1, slots, Hk, Dqk] in the pool's dtype: what the KV pool should hold after the step."""
        assert self.inputs is not None
        return self.inputs.image(True)

    @cached_property
    def modified(self) -> tuple[str, ...]:
        """Names of inputs that no longer hold what they held before the step."""
        named = self._activations()
        if not self.copies.same("before", "now"):
            before, now = self.copies.group("before"), self.copies.group("now")
            named = [*((name, before[name], now[name]) for name in before), *named]
        return tuple(name for name, was, is_ in named if not _same_bits(was, is_))

    def _activations(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """What the model's tables gave against what they hold now: the packed rows; q, k, v where those were copies."""
        rows, inputs = self.copies.group("activations"), self.inputs
        if inputs is None:
            return []
        data, layers, maps, found = inputs.data, self.schedule.case.layers, self.schedule.case.head_maps, []
        for name, now in rows.items():
            kind, _, layer = name.partition(" ")
            want = inputs.packed if kind == "packed" else {"q": data.q, "k": data.k, "v": data.v}[kind][int(layer)]
            if maps and kind != "packed":
                want = maps[int(layer)].q_part(want) if kind == "q" else maps[int(layer)].kv_part(want)
            said = "the packed q, k, v" if kind == "packed" else f"{kind} of {layers.name(int(layer))}"
            found.append((said, want, now))
        return found


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
