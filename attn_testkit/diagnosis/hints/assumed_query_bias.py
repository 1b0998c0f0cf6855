"""A bias among rows: attention is computed again with a usual mistake in the bias, and compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...steps.data import StepData, make_layers
from ...steps.query_bias import BEHIND_ROWS, COLUMNS_BETWEEN, bias_width
from .assumed_numbers import right_keys_and_a_wrong_number
from .evidence import LONGEST, Evidence, Supposed
from .hint import Level, assumption, hint


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


@assumption(_has_bias, silences=("uneven_offsets", "length_threshold"))
def other_query_bias(e: Evidence) -> Iterator[Supposed]:
    """Suppose no bias, or a bias that is scaled, in another base, transposed or of other rows."""
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
        "qq_bias is scaled as logits are: add it after the scale. The result is right with scaled biases",
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


# A sum that is capped moves all weights, and the attended KV tokens are not known then.
@assumption(
    lambda e: e.expected.data.qq_bias is not None and e.schedule.case.logit_cap > 0 and e.can_be_asked,
    silences=("uneven_offsets", "length_threshold"),
)
def capped_query_bias(e: Evidence) -> Iterator[Supposed]:
    """The soft cap is applied to the sum of logit and bias."""
    yield Supposed(
        "qq_bias is added before the soft cap, which is then applied to the sum: add it after the cap. The result is "
        "right for capped sums",
        replace(e.expected.data, capped_qq_bias=True), every_row=True,
    )  # fmt: skip


@hint(
    Level.SHOWN,
    when=lambda e: e.expected.data.qq_bias is not None and not e.comparison.all_finite,
    silences=("computed_nan",),
)
def query_bias_without_stride(e: Evidence) -> str:
    """All rows have the results of a bias that is read without the columns between its rows, or NaN."""
    data, case = e.expected.data, e.schedule.case
    if e.in_graph or case.head_maps or max(e.lens, default=0) > LONGEST or not len(data.positions):
        return ""
    read = replace(data, qq_bias=_without_stride(data, bias_width(case, case.most_new)))
    near, is_nan = e.near_or_nan(Supposed(data=read))
    if not (near & ~is_nan).any() or not bool(near.all()):
        return ""
    return (
        "rows of qq_bias are read as if they followed each other without a gap: use its stride(0), which is larger "
        "than its width. Reading with stride = width reproduces your output, or gives NaN"
    )


def _without_stride(data: StepData, width: int) -> torch.Tensor:
    """[1, T, C] float32: the values at offset i * ``width``, where row i of such a bias would begin; NaN between two
    rows."""
    bias = data.qq_bias
    assert bias is not None
    _, rows, columns = bias.shape
    memory = torch.full((rows, width + COLUMNS_BETWEEN), math.nan)
    memory[:, :width] = BEHIND_ROWS
    memory[:, :columns] = bias[0]
    return memory.flatten()[: rows * width].view(1, rows, width)[..., :columns]
