"""The check of a mode's outputs: fields, rows and numbers."""

from __future__ import annotations

import torch

from ..cases.case import Case
from ..families.expected import Expected
from ..results.finding import Finding
from ..steps.data import draft_topk
from .comparison import Comparison
from .describe import number, times
from .evaluation import Evaluation
from .observation import Observation, Outputs

_FIELDS = ("next_token_logits", "hidden_states", "topk_p", "topk_index")


def _finding(observed: Observation, headline: str, where: str = "", hint: str = "") -> list[Finding]:
    return [Finding("mode-outputs", headline, where=where, hint=hint, step=observed.label)]


def mode_outputs(comparison: Comparison, case: Case) -> list[Finding]:
    """Check that the mode returns exactly its fields, each within the limit carried through the weights."""
    observed, expected, topk = comparison.observed, comparison.expected, draft_topk(case)
    wanted = _FIELDS if topk else _FIELDS[:2]
    given = tuple(name for name in _FIELDS if getattr(observed.outputs, name) is not None)
    if given != wanted:
        return _finding(observed, f"{case.mode} returned fields {', '.join(given)}; expected {', '.join(wanted)}")
    outputs = observed.outputs
    assert outputs.next_token_logits is not None
    assert outputs.hidden_states is not None
    for name, got, want, limit in (
        ("hidden_states", outputs.hidden_states, expected.hidden, expected.hidden_limit),
        ("next_token_logits", outputs.next_token_logits, expected.logits, expected.logits_limit),
    ):
        found = _compare(observed, name, got, want, limit)
        if found:
            return found
    if topk:
        return _topk(observed, outputs, expected, topk)
    return []


def _compare(
    observed: Observation, name: str, got: torch.Tensor, want: torch.Tensor, limit: torch.Tensor
) -> list[Finding]:
    """Check that every element of ``got`` [R, width] is within its limit."""
    if got.shape != want.shape:
        return _finding(observed, f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    ratio = ((got.double() - want).abs() / limit).nan_to_num(torch.inf)
    if not ratio.numel() or float(ratio.max()) <= 1:
        return []
    row, column = divmod(int(ratio.argmax()), ratio.shape[1])
    return _finding(
        observed,
        f"{name} differs from the reference model run with oracle attention, "
        f"{times(float(ratio.max()))} over the limit",
        f"{name}[row {row}, {column}] = {number(float(got[row, column]))}, want {number(float(want[row, column]))}",
        "every attention output is right; probably the backend overwrote or replaced batch_size or "
        "num_accept_tokens, which the caller reads",
    )


_VANISHED = 87.0
"""Distance below the largest logit at which a probability is below 2^-125, and may be 0 in float32."""


def _topk(observed: Observation, outputs: Outputs, expected: Expected, k: int) -> list[Finding]:
    """Check top-k: indices may differ from the oracle's only if logits tie within limits or probabilities are 0."""
    p, index = outputs.topk_p, outputs.topk_index
    assert p is not None
    assert index is not None
    rows = expected.logits.shape[0]
    if tuple(p.shape) != (rows, k) or tuple(index.shape) != (rows, k) or index.dtype != torch.int64:
        return _finding(
            observed,
            f"topk_p and topk_index have shapes {tuple(p.shape)}, {tuple(index.shape)} ({index.dtype}); "
            f"expected ({rows}, {k}) and int64",
        )
    best, _ = expected.logits.topk(k, -1)
    chosen = expected.logits.gather(1, index.clamp(0, expected.logits.shape[1] - 1))
    slack = 2 * expected.logits_limit.amax(-1, keepdim=True)
    inside = (index >= 0) & (index < expected.logits.shape[1])
    largest = best[:, :1]
    vanished = (largest - best > _VANISHED) & (largest - chosen > _VANISHED)
    tied = (((best - chosen).abs() <= slack) | vanished) & inside
    if not tied.all():
        row = int((~tied).any(-1).nonzero()[0])
        return _finding(
            observed,
            f"topk_index of request {row} is {index[row].tolist()}, which are not the {k} most likely tokens",
            f"the oracle's are {expected.logits[row].topk(k)[1].tolist()}",
        )
    want = torch.ones_like(chosen) if k == 1 else torch.softmax(expected.logits, -1).gather(1, index)
    # A row whose logits may be anything has an infinite slack, and 0 * inf is NaN.
    free = slack.isinf()
    limit = torch.zeros_like(want) if k == 1 else torch.where(free, torch.inf, want * 2 * slack) + 1e-6
    if not ((p.double() - want).abs() <= limit).all():
        row = int((~((p.double() - want).abs() <= limit)).any(-1).nonzero()[0])
        return _finding(observed, f"topk_p of request {row} is {p[row].tolist()}, want {want[row].tolist()}")
    return []


EVALUATIONS = (
    Evaluation(
        "mode-outputs",
        run=lambda comparison, schedule, declared: mode_outputs(comparison, schedule.case),
    ),
)
