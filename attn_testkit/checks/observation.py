"""Results of one step of a backend, on the host, and the memory that it should have left.

``Copies`` are sent by the process that runs the backend. The judge makes an ``Observation`` from the copies, with a
schedule, a step and inputs that it computes itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..families.by_layer import schedule_of
from ..steps.data import StepData
from ..steps.packed_rows import accepted
from ..steps.schedule import Schedule, Step

Bytes = npt.NDArray[np.uint8]

Group = Literal["attention", "activations", "before", "now", "outputs", "pool", "lse", "finite parts", "beside",
                "selected", "index", "padding", "moved"]  # fmt: skip
RanBefore = Literal["", "steps", "graphs", "instances", "modes", "widths"]
"""Work that ran before an eager run, on its instance or on a co-resident one: nothing, other steps, graphs, another
instance, steps of other modes, batches of other widths."""


@dataclass(frozen=True)
class Outputs:
    """Outputs that the mode returns to its caller, live rows only. A field that the mode does not have is None."""

    next_token_logits: torch.Tensor | None
    """Tensor [rows, vocab] float32."""
    hidden_states: torch.Tensor | None
    """Tensor [rows, hidden] float32."""
    topk_p: torch.Tensor | None = None
    """Tensor [rows, k] float32."""
    topk_index: torch.Tensor | None = None
    """Tensor [rows, k] int64."""


@dataclass(frozen=True, eq=False)
class Copies:
    """Host copies of one step, in one block of memory."""

    flat: Bytes = field(repr=False)
    """Bytes of all tensors in sequence."""
    layout: tuple[tuple[Group, str, str, tuple[int, ...], int], ...] = field(repr=False)
    """Group, name, dtype, shape and first byte of each tensor, in the order of their memory."""

    def group(self, group: Group) -> dict[str, torch.Tensor]:
        """The tensors of one group by name, as views. Empty for a group that does not exist."""
        found: dict[str, torch.Tensor] = {}
        # numpy may give an empty array a stride of 0, and torch then cannot view it as another dtype.
        whole = torch.from_numpy(self.flat) if len(self.flat) else torch.empty(0, dtype=torch.uint8)
        for of, name, dtype_name, shape, start in self.layout:
            if of == group:
                dtype: torch.dtype = getattr(torch, dtype_name)
                found[name] = whole[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return found

    def cut(self) -> dict[Group, dict[str, torch.Tensor]]:
        """The tensors by group and name, as views."""
        return {group: self.group(group) for group in dict.fromkeys(entry[0] for entry in self.layout)}

    def same(self, one: Group, other: Group) -> bool:
        """True if two groups hold the same names, dtypes, shapes and bits in the same order."""
        a, b = ([entry for entry in self.layout if entry[0] == group] for group in (one, other))
        if [entry[1:4] for entry in a] != [entry[1:4] for entry in b]:
            return False
        return not a or np.array_equal(self.flat[_span(a)], self.flat[_span(b)])


def _span(entries: list[tuple[Group, str, str, tuple[int, ...], int]]) -> slice:
    """The bytes of adjacent entries of a layout."""
    _, _, dtype, shape, last = entries[-1]
    return slice(entries[0][4], last + math.prod(shape) * int(getattr(torch, dtype).itemsize))


class Piece(NamedTuple):
    """One tensor of a step, on the host."""

    group: Group
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    raw: Bytes
    """Bytes of the tensor."""


def copies_of(tensors: Iterable[tuple[Group, str, torch.Tensor]]) -> Copies:
    """Make copies of host tensors."""
    return copies_from(
        Piece(group, name, tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy())
        for group, name, tensor in tensors
    )


def copies_from(pieces: Iterable[Piece]) -> Copies:
    """Make copies of all pieces, in one block."""
    # Pieces that are compared as a whole are adjacent. Wide elements come first, so that each piece is aligned.
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
    """Inputs of a step, which the judge computes from the case: values that must not change, and values that should be
    written."""

    data: StepData
    """Values of the step. If ``save_kv_cache`` is False, ``k`` and ``v`` are NaN."""
    packed: torch.Tensor
    """Rows of the model's table; q, k and v are views of them, [T, L, width] in the model's dtype."""
    image: Callable[[bool], torch.Tensor] = field(repr=False)
    """The KV pool before the step or, with True, as it should be after it. Computed on request: it is large."""
    new_slots: torch.Tensor
    """Slots that the step should write, [n] int64, ascending. Empty if ``save_kv_cache`` is False."""
    new_rows: torch.Tensor
    """Contents that ``new_slots`` should get, [L, 2 or 1, n, Hk, Dqk] in the pool's dtype."""
    new_limit: torch.Tensor | None = None
    """Largest allowed error of each element, float64, in the same shape; None if the rows are compared bit for bit."""
    parts: Mapping[str, StepInputs] = field(default_factory=dict)
    """Family -> the inputs of its layers and the values of their memory, if layers are of several families. The
    memory of the others above is that of the first family."""


@dataclass(frozen=True)
class Observation:
    """Host copies taken right after a step, with the step's place in the run."""

    schedule: Schedule = field(repr=False)
    step: Step
    label: str
    """Name of the step: empty for a single eager step, else ``replay 4 of 7 (long and short), bucket 4, 3 live``."""
    copies: Copies
    ran_before: RanBefore = ""
    """Other work on the instance before an eager run: nothing, other eager steps, or graphs."""
    damaged: tuple[str, ...] = ()
    """Blocks that were freed after capture and that the replay wrote into."""
    replay: bool = False
    padded: int = 0
    """Number of padded requests."""
    eager_run: Observation | None = field(default=None, repr=False)
    """The backend's own eager run of the same step, if there was one."""
    inputs: StepInputs | None = field(default=None, repr=False)
    """Inputs, set by the judge; None while the step is sent, and if its memory is not checked."""

    def of_family(self, family: str) -> Observation:
        """The outputs and the memory of the layers of one family, as of a model without the others."""
        case = self.schedule.case
        places = [str(place) for place in case.places(family)]
        if len(places) == case.layers.count:
            return self
        own = tuple(
            (group, name.removeprefix(f"{family} "), dtype, shape, start)
            for group, name, dtype, shape, start in self.copies.layout
            if (group == "pool" and name.startswith(f"{family} ")) or (group == "attention" and name in places)
        )
        inputs = self.inputs.parts[family] if self.inputs else None
        return replace(
            self, schedule=schedule_of(self.schedule, family), copies=Copies(self.copies.flat, own), inputs=inputs
        )

    @cached_property
    def attention(self) -> tuple[torch.Tensor, ...]:
        """Output of every layer for the live rows, as the backend returned it: [T, Hq, Dv] or [T, Hq * Dv]."""
        return tuple(self.copies.group("attention").values())

    @cached_property
    def outputs(self) -> Outputs:
        """Outputs that the mode returns to its caller."""
        found: dict[str, Any] = {"next_token_logits": None, "hidden_states": None}
        return Outputs(**{**found, **self.copies.group("outputs")})

    @cached_property
    def written(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the KV pool that changed, [n] int64 ascending, and their bits now: [L, 2 or 1, n, Hk, Dqk]. The
        scales of packed rows that differ by rounding are the expected ones.
        """
        pieces = self.copies.group("pool")
        slots, rows = pieces["slots"], pieces["rows"]
        packed = self.inputs.data.row_format if self.inputs else None
        if packed and self.inputs:
            due = torch.isin(slots, self.inputs.new_slots)
            want = self.inputs.new_rows[:, :, torch.isin(self.inputs.new_slots, slots)]
            rows = rows.clone()
            rows[:, :, due] = accepted(packed, rows[:, :, due], want)
        return slots, rows

    @cached_property
    def outside(self) -> tuple[int, ...]:
        """Bytes of the pool's memory that belong to no slot and changed, at most one per block of memory."""
        found = self.copies.group("pool").get("outside")
        return () if found is None else tuple(found.tolist())

    @cached_property
    def pool(self) -> torch.Tensor:
        """The KV pool after the step, [L, 2 or 1, slots, Hk, Dqk] in the pool's dtype."""
        assert self.inputs is not None
        pool = self.inputs.image(False).clone()
        slots, rows = self.written
        raw = pool.view(rows.dtype)
        raw[:, :, slots] = rows
        return pool

    @cached_property
    def pool_after(self) -> torch.Tensor:
        """The expected KV pool after the step, [L, 2 or 1, slots, Hk, Dqk] in the pool's dtype."""
        assert self.inputs is not None
        return self.inputs.image(True)

    @cached_property
    def modified(self) -> tuple[str, ...]:
        """Names of inputs that the step changed."""
        named = self._activations()
        if not self.copies.same("before", "now"):
            before, now = self.copies.group("before"), self.copies.group("now")
            named = [*((name, before[name], now[name]) for name in before), *named]
        return tuple(name for name, was, is_ in named if not _same_bits(was, is_))

    def _activations(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, expected value and present value of the packed rows, and of q, k, v if these are copies."""
        rows, inputs = self.copies.group("activations"), self.inputs
        if inputs is None:
            return []
        data, layers, maps, found = inputs.data, self.schedule.case.layers, self.schedule.case.head_maps, []
        for name, now in rows.items():
            kind, _, layer = name.partition(" ")
            want = inputs.packed if kind == "packed" else data.of_layer(kind, int(layer))
            if maps and kind != "packed":
                want = maps[int(layer)].q_part(want) if kind == "q" else maps[int(layer)].kv_part(want)
            said = "the tensor that holds q, k and v" if kind == "packed" else f"{kind} of {layers.name(int(layer))}"
            found.append((said, want, now))
        return found


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
