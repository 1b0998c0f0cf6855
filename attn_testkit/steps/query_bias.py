"""The data of a bias among the rows of a step (``ForwardBatch.qq_bias``)."""

from __future__ import annotations

import numpy as np
import torch

from ..cases.fields import Fields
from ..contract import ForwardMode
from .schedule import Step

BEHIND_ROWS = 24.0
"""Value in columns after the rows of a request: a logit with it would get all weight."""
COLUMNS_BETWEEN = 3
"""Extra columns of the buffer after those of a row, which hold NaN; no batch has this width."""
_PARTS, _MOST = 8, 4


def bias_width(case: Fields, most: int) -> int:
    """Columns of ``ForwardBatch.qq_bias``; ``most``: rows that a request of an extend may have."""
    return most if case.mode is ForwardMode.EXTEND else case.width


def make_query_bias(case: Fields, step: Step, visible: torch.Tensor) -> torch.Tensor | None:
    """[1, T, C] float32, with C rows of the longest request; None if the case has no bias.

    ``visible`` [B, C, S] bool, without windows: the bias is -inf if a row does not see another. Other values are
    multiples of 1/8 up to 4, which are exact in bf16. They are drawn independently of all other data.
    """
    if case.qq_bias == "none":
        return None
    widest = visible.shape[1]
    rng = np.random.default_rng(step.seed ^ 0xB1A5)
    biases = step.bs if case.qq_bias == "own" else 1
    drawn = rng.integers(-_PARTS * _MOST, _PARTS * _MOST + 1, (biases, widest, widest)) / _PARTS
    rows = []
    for index, request in enumerate(step.requests):
        own = torch.from_numpy(drawn[index % biases]).float()[: request.new].clone()
        own[:, request.new :] = BEHIND_ROWS
        seen = visible[index, : request.new, request.prefix : request.prefix + request.new]
        own[:, : request.new].masked_fill_(~seen, -torch.inf)
        rows.append(own)
    return torch.cat(rows)[None]
