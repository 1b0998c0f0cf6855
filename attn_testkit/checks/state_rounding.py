"""Check of states that a decode rounds stochastically, to the number below or above: the nearer one more often.

An exact value x lies between two numbers of the state's dtype that are one unit apart. A fair rounding gives the upper
one with the probability f, the part of the unit by which x is above the lower one. So the error (stored - x) / unit has
the mean 0 and the variance f (1 - f). From these two follow the limits of three sums, without any tuning:

* of all errors of a step: 0, or the rounding has a bias;
* of the squares of sums along each axis (rows, columns, heads, requests): the sum of the variances. It is more if
  elements share a random number, and less if the rounding is to the nearest number;
* of the products of the errors of two steps: 0, or both used the same random numbers.

A kernel's own rounding in float32 moves x by up to ``off`` units, which is added to each limit. Convolutions of the
cases pass their input on (``FAIR_ROUNDING``), so ``off`` is small; elements near 0, whose units are short, do not count
in the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..cases.state import FAIR_ROUNDING
from ..families.by_layer import schedule_of
from ..families.recurrent.data import StateStepData, make_state_data, states_in
from ..families.recurrent.memory import from_rows
from ..families.recurrent.recurrence import recur
from ..families.rounding import SMALLEST
from ..results.finding import Finding
from .describe import number
from .evaluation import Evaluation
from .observation import Observation

_DEVIATIONS = 6.0
"""Standard deviations of a sum of errors: a fair rounding is beyond them once in 10^9 steps."""
_DEVIATIONS_OF_SQUARES = 8.0
"""Standard deviations of a sum of squares, which has a longer tail."""
_MOST_OFF = 1 / 32
"""Elements count in the sums if the kernel moves them by at most so many units."""
_BITS = {"fp16": 11, "bf16": 8}
"""Dtype -> bits of a significand."""
_AXES = {2: "heads", 3: "rows of a state", 4: "columns of a state", 1: "requests"}
"""Axis of states [L, E, Hv, V, K] -> elements along it."""


@dataclass(frozen=True, eq=False)
class _Rounded:
    """Errors of a step's states, [L, E, Hv, V, K] float64, in units."""

    error: torch.Tensor
    variance: torch.Tensor
    """Variance of a fair rounding."""
    off: torch.Tensor
    """The most by which the kernel's own arithmetic moves a value."""
    beyond: torch.Tensor
    """Elements that are more than a unit from the exact value."""
    count: int
    """Number of elements that count; the tensors above are 0 for the others."""
    slots: tuple[int, ...]
    """Slot of each of the E states."""


def _rounded(observed: Observation, data: StateStepData) -> _Rounded | None:
    """Errors of the states after a step; None if a slot was not written or holds NaN, which other checks report."""
    want, observed = recur(data), observed.of_family("recurrent")
    # A copy for a prefix cache may have the random numbers of its original.
    places = [place for place, end in enumerate(data.ends) if end.slot not in data.snapshot_slots]
    slots, (changed, held) = torch.tensor([data.ends[place].slot for place in places]), observed.written
    if not len(slots) or not bool(torch.isin(slots, changed).all()):
        return None
    got = from_rows(held[:, 0, torch.searchsorted(changed, slots), 0], data)[1].double()
    if not bool(got.isfinite().all()):
        return None
    dtype = data.shape.dtype
    exact = want.states[:, places]
    # The smallest normal number: below it the unit no longer shrinks.
    exponent = torch.frexp(exact.abs().clamp(min=SMALLEST[dtype] * 2.0 ** (_BITS[dtype] - 1)))[1]
    unit = torch.ldexp(torch.ones_like(exact), exponent - _BITS[dtype])
    off = (want.state_off[:, places][..., None] / unit).expand_as(exact)
    above = (exact / unit).frac().abs()
    variance = (above * (1 - above) + off).clamp(max=0.25)
    counts = off <= _MOST_OFF
    error = (got - exact) / unit
    return _Rounded(
        error=error.where(counts, 0.0),
        variance=variance.where(counts, 0.0),
        off=off.where(counts, 0.0),
        beyond=error.abs() > 1 + off,
        count=int(counts.sum()),
        slots=tuple(slots.tolist()),
    )


def rounds_fairly(observed: Observation) -> list[Finding]:
    """Check one step: errors below a unit, no bias, and no element that shares its random number with another."""
    data = None if observed.inputs is None else states_in(observed.inputs.data)
    found = None if data is None else _rounded(observed, data)
    if data is None or found is None:
        return []
    error, count = found.error, found.count
    if bool(found.beyond.any()):
        _, end, head, value, key = (int(i) for i in found.beyond.nonzero()[0])
        return [_finding(
            observed,
            f"{int(found.beyond.sum())} of {error.numel()} elements of states are over a unit from the exact value",
            f"state {end} of the batch, head {head}, state[{value}, {key}], in units of {data.shape.dtype}",
            "a stochastic rounding gives the number below the exact value or the one above it",
        )]  # fmt: skip
    bias, limit = float(error.sum()), float(_DEVIATIONS * found.variance.sum().sqrt() + found.off.sum())
    if count and abs(bias) > limit:
        mean = bias / count
        return [_finding(
            observed, f"states are rounded {'up' if bias > 0 else 'down'} on average by {number(abs(mean))} units",
            f"mean error of {count} elements; {_DEVIATIONS:g} deviations of a fair rounding, and the kernel's own "
            f"rounding, are {number(limit / count)} units",
            "a number is rounded up with a probability that is not the part of the unit by which it is above the lower "
            "one" if abs(mean) < 0.4 else "numbers are always rounded in one direction",
        )]  # fmt: skip
    return _shared(observed, found)


def _shared(observed: Observation, found: _Rounded) -> list[Finding]:
    """Find elements that share a random number, or that are rounded to the nearest number."""
    for axis, name in _AXES.items():
        if found.error.shape[axis] == 1 or not found.count:
            continue
        sums, variance, off = (each.sum(axis) for each in (found.error, found.variance, found.off))
        allowed = _DEVIATIONS_OF_SQUARES * (2 * variance.square() + variance).sum().sqrt()
        spread = float(sums.square().sum() / variance.sum())
        most = float(1 + (allowed + (off.square() + 2 * off * sums.abs()).sum()) / variance.sum())
        least = float(1 - allowed / variance.sum()) - float(found.off.sum() / variance.sum())
        if spread > most:
            what = f"{name} are not rounded independently: they share random numbers"
            hint = f"give each element a random number of its own: the offset of the generator must count {name}, too"
        elif spread < least:
            what = "states are not rounded stochastically"
            hint = "probably they are rounded to the nearest number: context.state.rounding is `stochastic`"
        else:
            continue
        where = (
            f"the square of the error of a sum of {found.error.shape[axis]} elements is {number(spread)} times its "
            f"variance; a fair rounding gives {number(least)} to {number(most)}"
        )
        return [_finding(observed, what, where, hint)]
    return []


def rounds_anew(observed: Sequence[Observation]) -> list[Finding]:
    """Check steps in their order: no step rounds with the random numbers of the one before it."""
    before: _Rounded | None = None
    for each in observed:
        case = each.schedule.case
        if case.data != FAIR_ROUNDING or case.state is None or case.state.rounding != "stochastic":
            continue
        now = (
            _rounded(each, make_state_data(schedule_of(each.schedule, "recurrent"), each.step))
            if each.step.requests
            else None
        )
        for first, second in _pairs(before, now) if before is not None and now is not None else ():
            both = float((first.error * second.error).sum())
            spread = first.variance * second.variance
            spread = spread + first.variance * second.off.square() + second.variance * first.off.square()
            limit = float(_DEVIATIONS * spread.sum().sqrt() + (first.off * second.off).sum())
            if both > limit:
                return [_finding(
                    each, "this step rounds its states with the random numbers of the step before it",
                    f"the sum of the products of both errors is {number(both)}, and a fair rounding gives at most "
                    f"{number(limit)}",
                    "a seed on the host is frozen by the capture of a graph: draw it on the device in each step, or "
                    "count the steps in a tensor that the kernel reads",
                )]  # fmt: skip
        before = now
    return []


def _pairs(first: _Rounded, second: _Rounded) -> list[tuple[_Rounded, _Rounded]]:
    """States of two steps that a kernel may give the same random numbers: those at the same place of the batch, and
    those in the same slot."""
    if first.error.shape[2:] != second.error.shape[2:]:
        return []
    count = min(len(first.slots), len(second.slots))
    places = list(range(count)), list(range(count))
    same = [slot for slot in first.slots if slot in second.slots]
    slots = [first.slots.index(slot) for slot in same], [second.slots.index(slot) for slot in same]
    return [
        (_at(first, one), _at(second, other)) for one, other in (places, slots) if one and len(one) == len(other)
    ]  # fmt: skip


def _at(found: _Rounded, ends: list[int]) -> _Rounded:
    tensors = {name: getattr(found, name)[:, ends] for name in ("error", "variance", "off", "beyond")}
    return replace(found, **tensors, slots=tuple(found.slots[end] for end in ends))


def _finding(observed: Observation, what: str, where: str, hint: str) -> Finding:
    return Finding("state-rounding", what, where=where, hint=hint, step=observed.label)


EVALUATIONS = (
    Evaluation(
        "state-rounding",
        shown_by=lambda case: case.data == FAIR_ROUNDING and case.state is not None,
        run=lambda comparison, *_: rounds_fairly(comparison.observed),
    ),
)
