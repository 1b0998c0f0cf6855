"""A bias among rows: attention is computed again with a usual mistake in the bias, and compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...steps.data import StepData, make_layers
from .assumed_numbers import right_keys_and_a_wrong_number
from .evidence import Evidence, Supposed
from .hint import assumption

__all__: list[str] = []


def _has_bias(e: Evidence) -> bool:
    return e.expected.data.qq_bias is not None and right_keys_and_a_wrong_number(e)


def _transposed(data: StepData, bias: torch.Tensor) -> torch.Tensor:
    """``bias`` [1, T, C] with rows and columns of each request swapped."""
    turned = bias.clone()
    for request in sorted(set(data.row_request.tolist())):
        mine = (data.row_request == request).nonzero()[:, 0]
        turned[:, mine, : len(mine)] = bias[:, mine, : len(mine)].transpose(1, 2)
    return turned


def _of_the_first_request(data: StepData, bias: torch.Tensor) -> torch.Tensor:
    """``bias`` [1, T, C] of the row of that number in the batch."""
    return bias[:, data.row_offset]


@assumption(_has_bias, silences=("uneven_offsets",))
def other_query_bias(e: Evidence) -> Iterator[Supposed]:
    """No bias, or one that is scaled, in another base, transposed or of other rows."""
    data, bias = e.expected.data, e.expected.data.qq_bias
    assert bias is not None

    def supposed(text: str, changed: torch.Tensor | None) -> Supposed:
        return Supposed(text, replace(data, qq_bias=changed), every_row=True)

    scales = torch.tensor([layer.scaling for layer in make_layers(e.schedule.case)]).view(-1, 1, 1)
    # The bias of a capture is 0, as if there were no bias.
    absent = "batch.qq_bias does not reach the kernel, or not on this path through it: the result is right without it"
    if e.in_graph:
        absent = "replays do not read batch.qq_bias: with 0, which it is at the capture, the result is right"
    yield supposed(absent, None)
    yield supposed(
        "qq_bias is scaled as logits are: add it behind the scale. The result is right with scaled biases",
        bias * scales,
    )
    yield supposed(
        "logits are multiplied by log2(e) for exp2, but qq_bias is not: the result is right with a bias in base 2",
        bias * math.log(2),
    )
    yield supposed(
        "rows and columns of qq_bias are swapped: the result is right with the bias of each request transposed",
        _transposed(data, bias),
    )
    if len(data.row_request) and int(data.row_request[-1]):
        yield supposed(
            "rows of qq_bias are counted inside their request: add its first row, cu_seqlens_q. The result is right "
            "with the biases of request 0 in all requests",
            _of_the_first_request(data, bias),
        )
