"""Promises about numbers: finite, written, right, and the same under a graph as in eager."""

from __future__ import annotations

import torch

from ..oracle.expect import Expected
from ..results import Finding
from .describe import number, requests_wrong, spread_text, times
from .observation import Observation

__all__ = [
    "NUMERIC",
    "finite",
    "graph_matches_eager",
    "left_alone",
    "margin",
    "matches_oracle",
    "output_written",
    "stacked",
    "told_row",
    "wrong_requests",
    "wrong_values",
]

NUMERIC = ("output-written", "finite", "matches-oracle")
"""Ids of the promises about attention outputs: what diagnosis explains, and what silences what follows from them."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def stacked(observed: Observation, expected: Expected) -> torch.Tensor:
    """[L, T, Hq, Dv] in the backend's dtype."""
    shape = expected.attention.shape[1:]
    return torch.stack([out.reshape(shape) for out in observed.attention])


def _unwritten(out: torch.Tensor) -> torch.Tensor:
    """Elements that still hold the poison's bits, which no computation gives."""
    return out.view(_INTEGERS[out.dtype.itemsize]) == -1


def output_written(observed: Observation, expected: Expected) -> list[Finding]:
    """No element of a real row still holds the poison that was there before."""
    out = stacked(observed, expected)
    missing = _unwritten(out)
    if not missing.any():
        return []
    layer, row, head, dim = (int(i) for i in missing.nonzero()[0])
    request = int(expected.data.row_request[row])
    return [
        Finding(
            "output-written",
            f"request {request} has output that was never written",
            where=f"out[layer {layer}, {_row(expected, row)}, head {head}, dim {dim}] still holds the poison",
            spread=_spread(observed, expected),
            step=observed.label,
        )
    ]


def left_alone(first: Observation, second: Observation, expected: Expected, fill: int) -> bool:
    """Whether a row of a head holds the poison in one run and, where that is the byte ``fill``, that in another.

    All of what was poison in the row must hold it: one number of a row has such bits by chance.
    """
    poisoned, again = _unwritten(stacked(first, expected)), stacked(second, expected)
    filled = (again.view(torch.uint8).reshape(*again.shape, -1) == fill).all(-1)
    return bool((poisoned.any(-1) & (filled | ~poisoned).all(-1)).any())


def finite(observed: Observation, expected: Expected) -> list[Finding]:
    """No NaN or Inf in a real row."""
    out = stacked(observed, expected)
    if out.isfinite().all():
        return []
    bad = ~out.isfinite() & ~_unwritten(out)
    if not bad.any():
        return []
    layer, row, head, dim = (int(i) for i in bad.nonzero()[0])
    request, got = int(expected.data.row_request[row]), number(float(out[layer, row, head, dim]))
    return [
        Finding(
            "finite",
            f"request {request} has {got} in its output",
            where=f"out[layer {layer}, {_row(expected, row)}, head {head}, dim {dim}] = {got}, "
            f"want {number(float(expected.attention[layer, row, head, dim]))}",
            spread=_spread(observed, expected),
            step=observed.label,
        )
    ]


def _ratios(out: torch.Tensor, expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """Error over limit, [L, T, Hq, Dv] by element and [L, T, Hq] by row; NaN counts as infinitely wrong."""
    error = (out.double() - expected.attention).abs()
    by_element = error / expected.attention_limit
    by_row = (error * error).sum(-1).sqrt() / expected.row_limit
    return by_element.nan_to_num(torch.inf, torch.inf), by_row.nan_to_num(torch.inf, torch.inf)


def margin(observed: Observation, expected: Expected) -> float:
    """Largest error / limit of the attention outputs; below 1 is within the limit."""
    by_element, by_row = _ratios(stacked(observed, expected), expected)
    return max(float(by_element.max()), float(by_row.max()))


def matches_oracle(observed: Observation, expected: Expected) -> list[Finding]:
    """Every element within its limit, every row of every head within its norm's."""
    out = stacked(observed, expected)
    by_element, by_row = _ratios(out, expected)
    known = out.isfinite()  # NaN and unwritten rows are told by their own promises
    wrong = (by_element > 1) & known
    wrong_rows = (by_row > 1) & known.all(-1)
    if not wrong.any() and not wrong_rows.any():
        return []
    if wrong.any():
        worst = torch.where(known, by_element, 0.0)
        layer, row, head, dim = _unravel(int(worst.argmax()), worst.shape)
        ratio = float(worst.max())
    else:
        worst = torch.where(known.all(-1), by_row, 0.0)
        layer, row, head = _unravel(int(worst.argmax()), worst.shape)
        dim, ratio = int(by_element[layer, row, head].argmax()), float(worst.max())
    request = int(expected.data.row_request[row])
    got, want = float(out[layer, row, head, dim]), float(expected.attention[layer, row, head, dim])
    return [
        Finding(
            "matches-oracle",
            f"request {request} differs from the oracle, {times(ratio)} over the limit",
            where=f"out[layer {layer}, {_row(expected, row)}, head {head}, dim {dim}] = {number(got)}, "
            f"want {number(want)} (limit {number(float(expected.attention_limit[layer, row, head, dim]))})",
            spread=_spread(observed, expected),
            step=observed.label,
        )
    ]


def graph_matches_eager(observed: Observation, expected: Expected, same_bits: bool = False) -> list[Finding]:
    """A replay within the two limits of the eager run of the same step: each may be off by one.

    ``same_bits``: it is promised that a request's bits depend on nothing but the request, so they must be equal. That
    alone shows a split count that a graph keeps from its capture (sglang #26019): any count is right within the limit.
    """
    twin = observed.eager_run
    if twin is None:
        return []
    out, eager = stacked(observed, expected), stacked(twin, expected)
    ratio = (out.double() - eager.double()).abs() / (2 * expected.attention_limit)
    wrong = ~(ratio <= 1)
    if not wrong.any() and same_bits:
        return _other_bits(observed, expected, out.view(_INTEGERS[out.itemsize]) != eager.view(_INTEGERS[out.itemsize]))
    if not wrong.any():
        return []
    layer, row, head, dim = _unravel(int(ratio.nan_to_num(torch.inf).argmax()), ratio.shape)
    request = int(expected.data.row_request[row])
    at = (layer, row, head, dim)
    return [
        Finding(
            "graph-matches-eager",
            f"request {request} gives another result under the graph than in eager",
            where=f"out[layer {layer}, {_row(expected, row)}, head {head}, dim {dim}]: replay "
            f"{number(float(out[at]))}, eager {number(float(eager[at]))}, want {number(float(expected.attention[at]))}",
            spread=spread_text(wrong.any(0), expected.data.row_request, observed.step),
            step=observed.label,
        )
    ]


def _other_bits(observed: Observation, expected: Expected, differs: torch.Tensor) -> list[Finding]:
    if not differs.any():
        return []
    request = int(expected.data.row_request[int(differs.permute(1, 0, 2, 3).flatten(1).any(-1).nonzero()[0])])
    return [
        Finding(
            "graph-matches-eager",
            f"request {request} gives other bits under the graph than in eager, and batch invariance is claimed",
            where=f"{int(differs.sum())} of {differs.numel()} values differ, all within the limit",
            spread=spread_text(differs.any(0), expected.data.row_request, observed.step),
            hint="a split count, a tile size or a kernel that depends on the capture or on padded rows",
            step=observed.label,
        )
    ]


def wrong_requests(observed: Observation, expected: Expected) -> list[int]:
    """Requests with any value out of its limit, NaN included."""
    wrong = wrong_values(observed, expected)
    return requests_wrong(wrong.permute(1, 0, 2, 3), expected.data.row_request, observed.step.bs)


def wrong_values(observed: Observation, expected: Expected) -> torch.Tensor:
    """[L, T, Hq, Dv] bool: values out of their limit, NaN included, and whole rows that are out of theirs."""
    by_element, by_row = _ratios(stacked(observed, expected), expected)
    wrong = by_element > 1
    return wrong | ((by_row > 1) & ~wrong.any(-1))[..., None]


def told_row(observed: Observation, expected: Expected) -> int | None:
    """The flat row that the headline of a finding is about: unwritten, else NaN or Inf, else the worst."""
    out = stacked(observed, expected)
    for bad in (_unwritten(out), ~out.isfinite()):
        if bad.any():
            return int(bad.nonzero()[0][1])
    if not wrong_values(observed, expected).any():
        return None
    by_element, by_row = _ratios(out, expected)
    ratio = by_element if (by_element > 1).any() else by_row
    return _unravel(int(ratio.argmax()), ratio.shape)[1]


def _row(expected: Expected, row: int) -> str:
    request, offset = int(expected.data.row_request[row]), int(expected.data.row_offset[row])
    several = int((expected.data.row_request == request).sum()) > 1
    return f"request {request}" + (f" row {offset}" if several else "")


def _spread(observed: Observation, expected: Expected) -> str:
    """Of everything that is wrong, whichever promise is told: what is called right is right."""
    wrong = wrong_values(observed, expected)
    return spread_text(wrong.any(0), expected.data.row_request, observed.step) + _layers_text(wrong)


def _layers_text(wrong: torch.Tensor) -> str:
    """Which layer, when it is one alone."""
    layers = [i for i in range(wrong.shape[0]) if wrong[i].any()]
    return f"; only layer {layers[0]}" if len(layers) == 1 and wrong.shape[0] > 1 else ""


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))
