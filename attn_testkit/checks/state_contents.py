"""Contents of a state's slot in place of the right ones: outputs of the convolution, and numbers of another dtype."""

from __future__ import annotations

import torch

from ..families.recurrent.data import StateStepData
from ..families.recurrent.recurrence import convolved
from ..families.rounding import SMALLEST, UNIT_ROUNDOFF
from ..steps.data import DTYPES

_LIMITS, _ROUNDINGS = 2.0, 1.5
"""Errors of an output of a convolution, in limits, and of a state, in roundings to the dtype of the model, that may be
there besides."""


def of_outputs(data: StateStepData, windows: torch.Tensor, bad: torch.Tensor) -> str:
    """Describe wrong windows [L, E, C, columns], those of ``bad`` [E] bool, whose columns of rows of the step hold what
    the convolution makes of these rows."""
    columns = windows.shape[-1]
    if data.nodes > 1 or not columns:
        return ""
    starts = [0, *torch.tensor(data.news).cumsum(0).tolist()]
    for index, layer in enumerate(data.layers):
        rows, off = convolved(layer, index, data)
        for end in bad.nonzero().flatten().tolist():
            first, last = starts[data.ends[end].request], data.ends[end].rows
            own = slice(first + max(0, last - columns), first + last)
            made, limit = rows[own].T, _LIMITS * off[own].T
            held = windows[index, end, :, columns - made.shape[-1] :].double()
            if not made.numel() or not bool(((held - made).abs() <= limit).all()):
                return ""
    return "its columns are outputs of the convolution, and a window holds its inputs"


def of_a_narrower_dtype(dtype: str, held: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> str:
    """Describe states in float32 that are right but for a rounding to the dtype of the model (ollama #15865).

    ``dtype``: of the model. ``held``, ``want``: contents of wrong slots, [L, E, Hv, V, K].
    ``limit`` [L, E, Hv, V]: of the rows.
    """
    if held.dtype != torch.float32 or dtype == "fp32":
        return ""
    rounded = _ROUNDINGS * UNIT_ROUNDOFF[dtype] * want.abs() + SMALLEST[dtype]
    near = (held.double() - want).abs() <= rounded + limit[..., None]
    if not bool(near.all()) or not torch.equal(held, held.to(DTYPES[dtype]).float()):
        return ""
    return (
        f"it is right but for a rounding to {dtype}, and each of its numbers is one of {dtype}: it passed through the "
        "dtype of the model before it was stored in float32"
    )
