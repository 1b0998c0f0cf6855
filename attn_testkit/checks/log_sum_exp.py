"""The check of log-sum-exps: of each KV split, and of the result that a backend merged."""

from __future__ import annotations

import math

import torch

from ..cases.case import Case
from ..cases.features.kv_splits import splits_of
from ..contract import Capabilities, LogSumExp
from ..results.finding import Finding
from .comparison import Comparison, place_of_max
from .describe import number, row_name, spread_text, times
from .evaluation import Evaluation
from .lse_hint import lse_hint
from .lse_patterns import LseEvidence


def log_sum_exp(comparison: Comparison, case: Case, declared: LogSumExp) -> list[Finding]:
    """Check that every log-sum-exp is within its limit, -inf exactly, and that a KV split without keys gives no NaN."""
    observed, expected = comparison.observed, comparison.expected
    want, limit = expected.lse, expected.lse_limit
    assert want is not None
    assert limit is not None
    held = observed.copies.group("lse")
    if [tuple(lse.shape) for lse in held.values()] != [tuple(want.shape[1:])] * len(want):
        return [Finding("log-sum-exp", "the step has no log-sum-exps", step=observed.label)]
    stored = torch.stack(list(held.values()))
    found = stored.double() * (math.log(2) if declared.base == "2" else 1.0)
    ratio = ((found - want).abs() / limit).masked_fill(found == want, 0.0).nan_to_num(torch.inf, torch.inf)
    if float(ratio.max()) <= 1:
        return _empty_parts(comparison, case, want)
    at = layer, row, part, head = place_of_max(found.isnan().double() if found.isnan().any() else ratio)
    request, name = int(expected.data.row_request[row]), _part_name(case, part)
    in_base = f" ({number(float(stored[at]))} in base 2)" if declared.base == "2" else ""
    evidence = LseEvidence(
        case, expected.data, layer, part, found[layer, :, part], stored[layer, :, part], declared.base
    )
    return [
        Finding(
            "log-sum-exp",
            f"request {request}: {_what_is_wrong(name, found[at], want[at], ratio[at])}",
            where=f"lse[layer {layer}, {row_name(expected.data, row)}, head {head}] = {number(float(found[at]))}"
            f"{in_base}, want {number(float(want[at]))} (limit {number(float(limit[at]))})",
            spread=spread_text((ratio[:, :, part] > 1).any(0)[..., None], expected.data.row_request, observed.step),
            hint=lse_hint(evidence, want[layer, :, part], limit[layer, :, part]),
            step=observed.label,
        )
    ]


def _what_is_wrong(name: str, found: torch.Tensor, want: torch.Tensor, ratio: torch.Tensor) -> str:
    if found.isnan():
        return f"the log-sum-exp of {name} is nan"
    if want == -torch.inf:
        return f"{name} has no key, but its log-sum-exp is {number(float(found))} instead of -inf"
    if found.isinf():
        return f"the log-sum-exp of {name} is {number(float(found))}"
    return f"the log-sum-exp of {name} differs from the oracle, {times(float(ratio))} over the limit"


def _part_name(case: Case, index: int) -> str:
    parts = splits_of(case)
    return str(parts[index]) if index < len(parts) else "the merged result of merge_state"


def _empty_parts(comparison: Comparison, case: Case, want: torch.Tensor) -> list[Finding]:
    """Find NaN that the kit's merge, as servers do it, carries into the result. A backend's merge may leave it out."""
    if case.merged_by_backend:
        return []
    data = comparison.expected.data
    for layer, finite in enumerate(comparison.observed.copies.group("finite parts").values()):
        bad = ~finite.bool() & (want[layer] == -torch.inf).any(-1)
        if bad.any():
            row, part = (int(i) for i in bad.nonzero()[0])
            name = _part_name(case, part)
            return [
                Finding(
                    "log-sum-exp",
                    f"request {int(data.row_request[row])} has no key in {name}, but its output there is NaN or Inf",
                    where=f"output of {name} [layer {layer}, {row_name(data, row)}]",
                    hint="a merge gives this output the weight 0, but 0 * NaN is NaN: return zeros if a row sees no "
                    "key",
                    step=comparison.observed.label,
                )
            ]
    return []


def _run(comparison: Comparison, case: Case, declared: Capabilities) -> list[Finding]:
    return log_sum_exp(comparison, case, declared.lse) if case.kv_splits and declared.lse else []


EVALUATIONS = (
    Evaluation(
        "log-sum-exp",
        applies=lambda declared, execution: declared.lse is not None,
        shown_by=lambda case: bool(case.kv_splits),
        run=lambda comparison, schedule, declared: _run(comparison, schedule.case, declared),
    ),
)
