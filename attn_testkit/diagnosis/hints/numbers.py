"""The right keys, and still a wrong result."""

from __future__ import annotations

from ...checks.numeric import margin
from ..attended_keys import Footprint
from .evidence import Evidence

__all__ = ["right_keys"]


def right_keys(e: Evidence) -> str:
    print_ = e.footprint
    if print_ is None or not print_.right or e.reads_foreign or e.mixups:
        return ""
    case = e.schedule.case
    if _cannot_tell(e, print_):
        large = not e.observed.replay and ", ".join(_DATA_SUSPECTS.get(case.data, []))
        return f"a NaN where logits are large: look at {large}" if large else ""
    if not print_.normalised:
        fp8 = "FP8 scales, " if case.kv_dtype != "same" else ""
        cap = " (a soft cap comes before the mask)" if case.logit_cap else ""
        return (
            f"weights of the right keys sum to {print_.total:.3g} instead of 1: look at {fp8}a denominator that counts "
            f"masked keys or misses some{cap}, saturation, or partial results that are combined wrongly"
        )
    few = margin(e.observed, e.expected)
    if few < _SMALL_ERROR and case.data != "negative":
        return (
            f"the right keys, and an error of only {few:.2g} times the limit: precision, such as q, logits, weights or "
            "partial sums rounded to the model's dtype"
        )
    suspects = [_rescaling(e)] if _rescaling(e) and case.data != "cliff" else []
    suspects += _DATA_SUSPECTS["cliff"] if case.data == "cliff" else []
    suspects += ["scale"]
    suspects += ["soft cap"] if case.logit_cap else []
    suspects += ["sinks"] if case.sinks else []
    suspects += ["FP8 scales"] if case.kv_dtype != "same" else []
    suspects += ["head mapping"] if case.heads.q_heads != case.heads.kv_heads else []
    suspects += ["the split of a row into latent and rope part"] if case.heads.family == "mla" else []
    suspects += ["row order"] if e.step.tokens > e.step.bs else []
    suspects += _DATA_SUSPECTS.get(case.data, [])
    return f"the right keys with wrong weights or values: look at {', '.join(dict.fromkeys(suspects))}"


_SMALL_ERROR = 5.0
"""Errors up to so many limits are what one rounding too many gives."""
_TILE = 16
"""No kernel's tile of keys is smaller."""
_RESCALING = "rescaling of what was summed when a later tile of keys has a larger maximum"


def _cannot_tell(e: Evidence, print_: Footprint) -> bool:
    """The keys that were asked about need not be all: behind a window others hide, and so does a NaN of a replay."""
    seen = len(print_.wanted)
    hidden = print_.window >= 0 and seen < e.lens[print_.request] - len(print_.not_asked)
    return not e.finite and (e.observed.replay or hidden)


def _rescaling(e: Evidence) -> str:
    """Only rows of several tiles of keys are wrong."""
    data, wrong = e.expected.data, set(e.rows)
    keys = [int(n) for n in data.visible[data.row_request, data.row_offset].sum(-1)]
    right = [n for row, n in enumerate(keys) if row not in wrong]
    lowest = min((keys[row] for row in wrong), default=0)
    if not right or lowest <= max(right) or lowest <= _TILE:
        return ""
    return f"{_RESCALING} or splits are merged (rows of up to {max(right)} keys are right, of {lowest} and more wrong)"


_DATA_SUSPECTS = {
    "negative": [
        "a finite value that stands for minus infinity (all logits of this case are near -6e4)",
        "overflow of q k before it is scaled",
    ],
    "peaked": ["overflow or saturation of large logits"],
    "cliff": [
        f"{_RESCALING} (logits of this case climb and fall by hundreds along the keys)",
        "overflow or saturation of large logits",
    ],
}
