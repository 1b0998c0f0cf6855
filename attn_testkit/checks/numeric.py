"""Checks of attention outputs against the oracle: written, finite, right."""

from __future__ import annotations

from ..results.finding import Finding
from .comparison import Comparison
from .describe import number, row_name, spread_text, times
from .evaluation import Evaluation


def output_written(comparison: Comparison) -> list[Finding]:
    """Check that no element of a real row still holds the poison that was there before."""
    if comparison.right:
        return []
    missing = comparison.unwritten
    if not missing.any():
        return []
    layer, row, head, dim = (int(i) for i in missing.nonzero()[0])
    data = comparison.expected.data
    return [
        Finding(
            "output-written",
            f"request {int(data.row_request[row])} has output that was never written",
            where=f"out[{comparison.name(layer)}, {row_name(data, row)}, head {head}, dim {dim}] still holds the "
            f"poison",
            spread=spread(comparison),
            step=comparison.observed.label,
        )
    ]


def finite(comparison: Comparison) -> list[Finding]:
    """Check that no real row has NaN or Inf. Elements that were never written are left to ``output-written``."""
    if comparison.right or comparison.all_finite:
        return []
    bad = ~comparison.finite & ~comparison.unwritten
    if not bad.any():
        return []
    at = layer, row, head, dim = tuple(int(i) for i in bad.nonzero()[0])
    data, got = comparison.expected.data, number(float(comparison.out[at]))
    return [
        Finding(
            "finite",
            f"request {int(data.row_request[row])} has {got} in its output",
            where=f"out[{comparison.name(layer)}, {row_name(data, row)}, head {head}, dim {dim}] = {got}, "
            f"want {number(float(comparison.expected.attention[at]))}",
            spread=spread(comparison),
            step=comparison.observed.label,
        )
    ]


def matches_oracle(comparison: Comparison) -> list[Finding]:
    """Check that every element is within its limit, and the norm of every row of a head, too. NaN is reported by other
    checks."""
    worst = comparison.worst
    if worst is None:
        return []
    layer, row, head, dim, ratio = worst
    at, expected = (layer, row, head, dim), comparison.expected
    # A ratio that is not large reads like a rounding error, but nothing was computed.
    zeros = "" if comparison.out[layer, row].any() else ": a row of its output is all zeros"
    request = int(expected.data.row_request[row])
    return [
        Finding(
            "matches-oracle",
            f"request {request} differs from the oracle, {times(ratio)} over the limit{zeros}",
            where=f"out[{comparison.name(layer)}, {row_name(expected.data, row)}, head {head}, dim {dim}] = "
            f"{number(float(comparison.out[at]))}, want {number(float(expected.attention[at]))} "
            f"(limit {number(float(expected.attention_limit[at]))})",
            spread=spread(comparison),
            step=comparison.observed.label,
        )
    ]


def spread(comparison: Comparison) -> str:
    """Describe how far all wrong values spread, whichever check reports them, so that everything else is right."""
    wrong = comparison.wrong
    layers = [i for i in range(wrong.shape[0]) if wrong[i].any()]
    shown = wrong.any(0)
    if maps := comparison.observed.schedule.case.head_maps:
        # As many heads and dims as the wrong layers have.
        heads, dim = (max(each) for each in zip(*((maps[i].layer[0], maps[i].layer[2]) for i in layers), strict=True))
        shown = shown[:, :heads, :dim]
    text = spread_text(shown, comparison.expected.data.row_request, comparison.observed.step)
    return text + (f"; only {comparison.name(layers[0])}" if len(layers) == 1 and wrong.shape[0] > 1 else "")


EVALUATIONS = (
    Evaluation(
        "matches-oracle",
        run=lambda comparison, *_: matches_oracle(comparison),
    ),
    Evaluation(
        "finite",
        run=lambda comparison, *_: finite(comparison),
    ),
    Evaluation(
        "output-written",
        run=lambda comparison, *_: output_written(comparison),
    ),
)
