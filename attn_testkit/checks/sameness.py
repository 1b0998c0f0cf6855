"""Checks of bits and of selected keys: the same batch again, and the same request with other requests in the batch.

Bits are those of outputs, and of the states and windows that a step leaves: nothing reads these before the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..contract import Execution
from ..families.by_layer import make_data
from ..families.recurrent.data import states_in
from ..families.recurrent.memory import from_rows
from ..results.finding import Finding
from ..steps.last_rows import has_last_rows
from .comparison import BITS
from .evaluation import Evaluation
from .observation import Observation


def _differs(a: torch.Tensor, b: torch.Tensor) -> int:
    """Count elements whose bits differ; ``a`` and ``b`` have one shape and dtype."""
    a, b = (tensor.contiguous().view(BITS[tensor.dtype.itemsize]) for tensor in (a, b))
    return int((a != b).sum())


_ALL = slice(None)


def _other_keys(first: Observation, second: Observation, rows: slice = _ALL, own: slice = _ALL) -> str:
    """The first layer in which ``rows`` of ``first`` and ``own`` of ``second``, which are the same rows, select
    different keys, and the number of such rows; empty if there are none. The order of a row's keys does not count: if
    it changes the output, the output's bits show it.
    """
    again = second.copies.group("selected")
    for layer, keys in first.copies.group("selected").items():
        a, b = (each.sort(1).values for each in (keys[rows], again[layer][own]))
        count = int((a != b).any(1).sum())
        if count:
            return f"{first.schedule.case.layers.name(int(layer))}: {count} of {len(a)} rows select different keys"
    return ""


@dataclass(frozen=True)
class _Left:
    """States and windows of convolutions after a step."""

    names: list[str]
    """Names of the layers that keep a state."""
    requests: torch.Tensor
    """[n] int64: the request of each slot."""
    written: torch.Tensor
    """[n] bool: slots in which a bit changed."""
    parts: tuple[torch.Tensor, torch.Tensor]
    """Windows and states, [L, n, ...] each."""

    def of(self, request: int | None) -> tuple[torch.Tensor, ...]:
        """Windows and states of one request, or of all. Empty if there are none, or if a slot was not written."""
        own = torch.ones_like(self.written) if request is None else self.requests == request
        return tuple(part[:, own] for part in self.parts) if own.any() and bool(self.written[own].all()) else ()


def _left(observed: Observation) -> _Left | None:
    """The states that a step leaves. None if there are none, or if random numbers round them, which differ each
    time."""
    case = observed.schedule.case
    if case.state is None or case.state.rounding == "stochastic":
        return None
    # Inputs of an observation exist only while its step is evaluated.
    data = states_in(make_data(observed.schedule, observed.step))
    changed, held = observed.of_family("recurrent").written
    if data is None or not data.ends or not len(changed):
        return None
    slots = torch.tensor([end.slot for end in data.ends], dtype=torch.int64)
    places = torch.searchsorted(changed, slots).clamp(max=len(changed) - 1)
    return _Left(
        [case.layers.name(place) for place in case.places("recurrent")],
        torch.tensor([end.request for end in data.ends], dtype=torch.int64),
        torch.isin(slots, changed),
        from_rows(held[:, 0, places, 0], data),
    )


def _other_states(first: _Left | None, second: _Left | None, request: int | None = None, own: int | None = None) -> str:
    """The first layer in which ``request`` of ``first`` and ``own`` of ``second``, which are the same request, leave
    other bits, and the number of them; empty if there is none. None: all requests of the same step.
    """
    if first is None or second is None:
        return ""
    pairs = [(a, b) for a, b in zip(first.of(request), second.of(own), strict=False) if a.shape == b.shape]
    for layer, name in enumerate(first.names):
        count = sum(_differs(a[layer], b[layer]) for a, b in pairs)
        if count:
            return f"{name}: {count} numbers of the states and windows differ"
    return ""


def repeatable(first: Observation, second: Observation) -> list[Finding]:
    """Check that two runs of one step agree: in the keys that each row selects, and in every bit of every layer."""
    if where := _other_keys(first, second):
        return [
            Finding(
                "repeatable",
                "the same batch gave a different selection the second time, although determinism is declared",
                where=where,
                hint="probably keys of equal score that are taken in the order of arrival; ranks of one model then "
                "attend to different keys",
            )
        ]
    for layer, (a, b) in enumerate(zip(first.attention, second.attention, strict=True)):
        count = _differs(a, b)
        if count:
            return [
                Finding(
                    "repeatable",
                    "the same batch gave different bits the second time, although determinism is declared",
                    where=f"{first.schedule.case.layers.name(layer)}: {count} of {a.numel()} values differ",
                    hint="probably atomics, a split count that varies, or a counter that the first run left dirty",
                )
            ]
    if where := _other_states(_left(first), _left(second)):
        return [
            Finding(
                "repeatable",
                "the same batch left other bits in its states the second time, although determinism is declared",
                where=where,
                hint="the outputs are the same, so look at what is stored after the last row: atomics, or partial sums "
                "that are added in the order of arrival",
            )
        ]
    return []


def batch_invariant(together: Observation, few: Observation) -> list[Finding]:
    """Check that the requests of ``few``, a part of ``together`` (``Step.part_of``), give the same bits as in
    ``together``. At most one finding, for the first request that does not.
    """
    assert few.step.part_of is not None
    starts = np.cumsum([0, *(request.new for request in together.step.requests)])
    row, of_together, of_few = 0, _left(together), _left(few)
    for place, (index, request) in enumerate(zip(few.step.part_of[1], few.step.requests, strict=True)):
        rows, own = slice(starts[index], starts[index] + request.new), slice(row, row + request.new)
        row += request.new
        company = "by itself" if few.step.bs == 1 else f"in a batch of {few.step.bs}"
        if where := _other_keys(together, few, rows, own):
            return [
                Finding(
                    "batch-invariant",
                    f"request {index} selects different keys {company} than in a batch of {together.step.bs}",
                    where=where,
                    hint="probably a top-k that breaks ties differently if there are other rows",
                )
            ]
        for layer, (a, b) in enumerate(zip(together.attention, few.attention, strict=True)):
            count = _differs(a[rows], b[own])
            if count:
                return [
                    Finding(
                        "batch-invariant",
                        f"request {index} gives different bits {company} than in a batch of {together.step.bs}",
                        where=f"{few.schedule.case.layers.name(layer)}: {count} of {a[rows].numel()} values differ",
                        hint="probably a kernel, tile size or split count that depends on the rest of the batch",
                    )
                ]
        if where := _other_states(of_together, of_few, index, place):
            return [
                Finding(
                    "batch-invariant",
                    f"request {index} leaves other bits in its state {company} than in a batch of {together.step.bs}",
                    where=where,
                    hint="the outputs are the same, so look at what is stored after the last row",
                )
            ]
    return []


_OF_MODES = "probably another kernel, tile size or split count in one of the modes"
_OF_GRAPHS = (
    "probably a kernel, tile size or split count that is chosen at capture: by the bucket, by padded requests, or by a "
    "maximum length of the capture; if case-runs of this mode in graphs fail too, read those first"
)


def mode_invariant(extend: Observation, last_rows: Observation) -> list[Finding]:
    """Check that rows of another mode give the same bits as the last rows of an eager extend (``steps/last_rows.py``).

    ``last_rows``: an eager step or a replay; of extend, only a replay. At most one finding, for the first request that
    does not.
    """
    mode = str(last_rows.schedule.case.mode)
    where = f"a replay of {mode} in bucket {last_rows.step.bucket}" if last_rows.replay else mode
    end = own = 0
    for index, (request, few) in enumerate(zip(extend.step.requests, last_rows.step.requests, strict=True)):
        end, own = end + request.new, own + few.new
        for layer, (a, b) in enumerate(zip(extend.attention, last_rows.attention, strict=True)):
            whole, mine = a[end - few.new : end], b[own - few.new : own]
            count = _differs(whole, mine.view_as(whole))
            if count:
                return [
                    Finding(
                        "mode-invariant",
                        f"request {index} gives different bits in {where} than the same rows with the same keys in "
                        "extend",
                        where=f"{extend.schedule.case.layers.name(layer)}: {count} of {whole.numel()} values differ",
                        hint=_OF_GRAPHS if last_rows.replay else _OF_MODES,
                        step=last_rows.label,
                    )
                ]
    return []


EVALUATIONS = (
    Evaluation(
        "repeatable",
        applies=lambda declared, execution: declared.promises.deterministic and execution is Execution.EAGER,
    ),
    Evaluation(
        "batch-invariant",
        applies=lambda declared, execution: declared.promises.batch_invariant and execution is Execution.EAGER,
        shown_by=lambda case: case.bs > 1,
    ),
    Evaluation(
        "mode-invariant",
        applies=lambda declared, execution: declared.promises.mode_invariant and execution is Execution.EAGER,
        shown_by=has_last_rows,
    ),
)
