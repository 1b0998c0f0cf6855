"""Miscounted keys of a row: the few runs of keys whose codes add up to the error of its output.

The error in keys (``key_counts.py``) is a sum of codes. A run of keys adds the difference of two places of the walk, so
runs of any length are as easy to try as single keys. The run that explains most is removed repeatedly until only
rounding is left. Codes are whole numbers in many channels, so it is very unlikely that wrong runs would also leave only
rounding. If more is left after a few runs, nothing is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..families.softmax.attention import seen_in
from ..steps.data import make_layers
from .comparison import Comparison
from .key_counts import HALF_A_KEY, code_sizes, codes_of, in_keys

_MOST_RUNS = 4
"""Number of runs that are named. More runs would mean a wrong softmax or a wrong request, not a miscount."""
_MOST_TRIES = 12
"""Most runs of keys that are removed. If two runs are adjacent, the first one may be found with one key too many or too
few."""
_SHORT = 128
"""Longest run that is tried from every key; both ends of a longer run are conspicuous. A power of two."""
_STARTS = 512
"""Number of short runs that are tried."""
_ENDS_OF_A_START = 4
_SOME = 1024
"""Number of keys from which the contribution of one key is estimated."""
_ENDS = 96
"""Number of places that are tried as either end of a long run."""
_EXACT = HALF_A_KEY / 16
"""Error in keys that float32 sums of codes may leave in long requests, even if rounding leaves less."""
_MOST_NUMBERS = 1 << 27
"""Number of code values that are processed together."""


@dataclass(frozen=True)
class Miscount:
    """A run of keys of one request, all of them counted equally often."""

    request: int
    first: int
    last: int
    extra: int
    """Number of extra counts; -1 means that the keys are left out."""

    @property
    def length(self) -> int:
        """Number of keys."""
        return self.last - self.first + 1


@dataclass(frozen=True, eq=False)
class Miscounts:
    """Runs of keys that explain the error of one row."""

    request: int
    row: int
    """Index of the row inside the request."""
    layer: int
    """The layer that was examined; others with an equal window may have been examined too."""
    visible: torch.Tensor
    """Keys of the request that it should count once, as bool."""
    runs: tuple[Miscount, ...]
    """Runs in ascending order, those of the row's own request first. Adjacent runs differ in ``extra``."""

    @property
    def left_out(self) -> tuple[Miscount, ...]:
        """Runs that it should have counted."""
        return tuple(run for run in self.runs if run.extra < 0)

    @property
    def repeated(self) -> tuple[Miscount, ...]:
        """Runs of keys that the row should have counted once and counted more often."""
        return tuple(run for run in self._own_extra if bool(self.visible[run.first]))

    @property
    def unseen(self) -> tuple[Miscount, ...]:
        """Runs of keys of the row's own request that the row may not see."""
        return tuple(run for run in self._own_extra if not bool(self.visible[run.first]))

    @property
    def of_others(self) -> tuple[Miscount, ...]:
        """Runs of other requests."""
        return tuple(run for run in self.runs if run.request != self.request)

    @property
    def _own_extra(self) -> tuple[Miscount, ...]:
        return tuple(run for run in self.runs if run.request == self.request and run.extra > 0)


@dataclass(frozen=True, eq=False)
class _Asked:
    """The error of a row in M channels, which are of several heads and layers, and the walks that may explain the
    error."""

    error: torch.Tensor
    """Error in keys, [M] float32."""
    total: float
    """Sum of the weights that the row should have, in keys: with sinks this is more than the number of keys."""
    walks: tuple[torch.Tensor, ...]
    """Running sums of each request's codes, [n + 1, M] float32: of none, one, two, ... keys."""
    request: int
    counted: torch.Tensor
    """Number of the request's first none, one, two, ... keys that the row should count, [n + 1] int64."""
    rounding: float
    """Mean square, in keys, of what rounding may leave of the error, and at most that of half a key."""


def find_miscounts(comparison: Comparison, row: int) -> Miscounts | None:
    """Find the miscounts of a flat row, by its wrong layers and heads. None if a few runs do not explain its error.

    Raises ``ValueError`` for data other than codes.
    """
    expected, lens = comparison.expected, comparison.observed.step.lens
    if expected.key_factor is None:
        raise ValueError("keys can be counted only in data of the pattern 'plus_minus_one'")
    data, layers = expected.data, make_layers(comparison.observed.schedule.case)
    wrong = (
        comparison.wrong[:, row].any(-1) & comparison.finite[:, row].all(-1) & expected.key_factor[:, row].isfinite()
    )
    # A head that nothing computed is all zeros: no weights of any keys give that, so runs of keys would be invented.
    wrong &= (comparison.out[:, row] != 0).any(-1)
    if not wrong.any():
        return None
    request, offset = int(data.row_request[row]), int(data.row_offset[row])
    windows = [layer.sliding_window_size for layer in layers]
    at = max(wrong.any(-1).nonzero().flatten().tolist(), key=lambda i: windows[i] if windows[i] >= 0 else math.inf)
    chunks = [layer.attention_chunk_size for layer in layers]
    alike = [i for i in range(len(layers)) if (windows[i], chunks[i]) == (windows[at], chunks[at])]
    visible = seen_in(data.visible, data, layers[at])[request, offset, : lens[request]]
    asked = _ask(comparison, row, wrong, sorted(alike, key=lambda i: i != at), visible)
    found = _explain(asked)
    return None if found is None else Miscounts(request, offset, at, visible, found)


def _ask(comparison: Comparison, row: int, wrong: torch.Tensor, layers: Sequence[int], visible: torch.Tensor) -> _Asked:
    """Collect KV heads of ``layers`` with a wrong head (``wrong`` [L, Hq] bool), as many as memory allows."""
    expected, lens = comparison.expected, comparison.observed.step.lens
    assert expected.key_sum is not None
    data = expected.data
    group = wrong.shape[1] // data.stored_keys.shape[3]
    pairs = list(dict.fromkeys((i, h // group) for i in layers for h in wrong[i].nonzero().flatten().tolist()))
    most = max(1, _MOST_NUMBERS // (sum(lens) * data.v.shape[-1]))
    every, sizes = in_keys(comparison.out, expected), code_sizes(data)
    errors, outs, codes, rounding = [], [], [], []
    for layer, kv_head in pairs[:most]:
        heads = [h for h in range(kv_head * group, (kv_head + 1) * group) if wrong[layer, h]]
        errors.append(every[layer, row, heads].mean(0))
        outs.append((comparison.out[layer, row, heads].double() / sizes[layer]).mean(0))
        codes.append(codes_of(data, lens, layer, kv_head))
        rounding.append(_rounding(comparison, layer, row, heads))
    # A row that counts a key once more also divides by one more: each key adds its code minus the output.
    out = torch.cat(outs).float()
    walks = tuple(_walk(part, out) for part in torch.split(torch.cat(codes, 1), list(lens)))
    counted = torch.nn.functional.pad(visible.cumsum(0), (1, 0))
    total = float(expected.key_sum[pairs[0][0], row].mean())
    left = min(HALF_A_KEY**2, max(_EXACT**2, sum(rounding) / len(rounding)))
    return _Asked(torch.cat(errors).float(), total, walks, int(data.row_request[row]), counted, left)


def _rounding(comparison: Comparison, layer: int, row: int, heads: Sequence[int]) -> float:
    """Mean square of the limits of a row's ``heads``, in keys. A row that counts few of its keys has larger outputs
    than it should have, and these are rounded to a larger spacing.

    Without this bound, half a key would be left of the error of a row that sees one key and gives it another weight,
    and that row would be reported as one that reads no key.
    """
    expected = comparison.expected
    assert expected.key_sum is not None
    in_keys = expected.key_sum[layer, row, heads, None] / code_sizes(expected.data)[layer]
    limit = expected.attention_limit[layer, row, heads] * in_keys
    out, want = (each[layer, row, heads].double().square().mean() for each in (comparison.out, expected.attention))
    return float(limit.square().mean() * (out / want).clamp(min=1.0))


def _walk(codes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Running sums of [n, M] codes, as [n + 1, M]."""
    walk = torch.nn.functional.pad(codes, (0, 0, 1, 0)).cumsum_(0)
    return walk.sub_(torch.arange(len(walk))[:, None] * out)


def _explain(asked: _Asked) -> tuple[Miscount, ...] | None:
    """Find runs one by one, the one that explains most first."""
    error, total = asked.error, asked.total
    found: list[Miscount] = []
    for _ in range(_MOST_TRIES):
        left = float(error.square().mean()) * (asked.total / total) ** 2
        if left <= asked.rounding:
            runs = _joined(asked, found)
            return runs if runs is not None and len(runs) <= _MOST_RUNS else None
        tried = [_best_run(asked, request, error, total) for request in _in_order(asked)]
        off, run = min(tried, key=lambda each: each[0])
        if off >= left:
            return None
        found.append(run)
        walk = asked.walks[run.request]
        error = error - run.extra * (walk[run.last + 1] - walk[run.first])
        total += run.extra * run.length
    return None


def _in_order(asked: _Asked) -> list[int]:
    """List requests that have keys, the row's own first."""
    with_keys = (request for request, walk in enumerate(asked.walks) if len(walk) > 1)
    return sorted(with_keys, key=lambda request: request != asked.request)


def _best_run(asked: _Asked, request: int, error: torch.Tensor, total: float) -> tuple[float, Miscount]:
    """Find the run of a request's keys, left out or counted once more, that explains most of ``error`` [M], and the
    mean square of the rest. The rest is measured on outputs times the row's own total, so that a wrong total counts as
    well. ``total``: the row's weights as far as they are explained.
    """
    walk = asked.walks[request]
    along = walk @ error
    starts, ends = _candidates(walk, along, asked.counted if request == asked.request else None)
    sizes = (walk[ends] - walk[starts]).square_().sum(1)
    products = along[ends] - along[starts]
    extra = products.sign()
    totals = total + extra * (ends - starts)
    left = (error.square().sum() - 2 * products.abs() + sizes) / len(error) * (asked.total / totals).square()
    allowed = products > 0
    if request == asked.request:
        allowed |= asked.counted[ends] - asked.counted[starts] == ends - starts
    left[~allowed | (totals < HALF_A_KEY)] = torch.inf
    at = int(left.argmin())
    return float(left[at]), Miscount(request, int(starts[at]), int(ends[at]) - 1, int(extra[at]))


def _candidates(
    walk: torch.Tensor, along: torch.Tensor, counted: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find starts and ends [P] int64 of runs that may explain most, from ``along`` [n + 1]: the walk times the error.

    ``counted``: set for the row's own request, whose keys may be left out; None for another, whose keys may not.
    """
    # A run explains its product minus half of its size, and sizes grow with the number of keys.
    price = walk[: _SOME + 1].diff(dim=0).square_().sum(1).mean() / 2 * torch.arange(len(along))
    pairs = [_both_ends(along), _short_runs(along - price)]
    if counted is not None:
        # More than any run can explain, for each key that the row does not count and that cannot be left out.
        never = (along.max() - along.min() + price[-1] + 1).double() * (torch.arange(len(along)) - counted)
        pairs.append(_short_runs(-along - price - never))
    first, last = torch.cat(pairs, 1)
    return first, last


def _short_runs(worth: torch.Tensor) -> torch.Tensor:
    """Starts and ends [2, P] int64 of the short runs between whose ends ``worth`` [n + 1] grows most."""
    n = len(worth) - 1
    most = torch.nn.functional.pad(worth[1:], (0, _SHORT - 1), value=-math.inf)
    ahead = 1
    while ahead < _SHORT:
        most = torch.maximum(most[:-ahead], most[ahead:])
        ahead *= 2
    starts = (most - worth[:-1]).topk(min(n, _STARTS)).indices
    ends = starts[:, None] + torch.arange(1, _SHORT + 1)
    inside = worth[ends.clamp(max=n)].masked_fill_(ends > n, -math.inf)
    best = inside.topk(_ENDS_OF_A_START, dim=1).indices
    ends = ends.gather(1, best).flatten()
    starts = starts.repeat_interleave(_ENDS_OF_A_START)
    return torch.stack([starts, ends])[:, ends <= n]


def _both_ends(along: torch.Tensor) -> torch.Tensor:
    """Starts and ends [2, P] of runs between places where ``along`` is largest and where it is smallest."""
    few = min(_ENDS, len(along))
    edges = torch.tensor([0, len(along) - 1])
    high, low = (torch.cat([along.topk(few, largest=up).indices, edges]) for up in (True, False))
    both = torch.cartesian_prod(high, low).T
    both = both[:, both[0] != both[1]]
    return torch.stack([both.amin(0), both.amax(0)])


def _joined(asked: _Asked, runs: Sequence[Miscount]) -> tuple[Miscount, ...] | None:
    """Convert overlapping runs to runs that do not overlap. None if a key would have a negative count."""
    found: list[Miscount] = []
    for request in _in_order(asked):
        mine = [run for run in runs if run.request == request]
        if not mine:
            continue
        extra = torch.zeros(len(asked.walks[request]) - 1, dtype=torch.int64)
        for run in mine:
            extra[run.first : run.last + 1] += run.extra
        own = asked.counted.diff() if request == asked.request else torch.zeros_like(extra)
        if bool((extra + own < 0).any()):
            return None
        found += _runs(request, extra, own)
    return tuple(found)


def _runs(request: int, extra: torch.Tensor, own: torch.Tensor) -> Iterator[Miscount]:
    """Split keys into runs of one nonzero value in ``extra`` [n] and one value in ``own`` [n] (the row may see it)."""
    turns = ((extra.diff() != 0) | (own.diff() != 0)).nonzero().flatten() + 1
    starts = [0, *turns.tolist()]
    for first, end in zip(starts, [*starts[1:], len(extra)], strict=True):
        if extra[first]:
            yield Miscount(request, first, end - 1, int(extra[first]))
