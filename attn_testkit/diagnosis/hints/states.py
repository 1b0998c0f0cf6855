"""Layers with a state: the first wrong row of a prompt, its chunk, and the decays for which the result is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch

from ...cases.state import EXACT_GATES, FAIR_ROUNDING, NEAR_EPSILON, STATE_DATA
from ...contract import StateLayer
from ...families.recurrent.chunks import CHUNKS, HANDED_ON, ChunkMistake, ChunkSlip
from ...families.recurrent.data import StateStepData, has_values_beyond_fp16
from ...families.recurrent.recurrence import gates_of_rows, recur
from ...steps.data import DTYPES
from .evidence import Evidence
from .hint import Level, hint

_LONGEST = 1024
"""Most rows of a request for which mistakes are tried: each is computed row by row."""


_OF_ROUNDING = ("mistake_of_chunks", "first_wrong_row", "decays_that_are_right")
"""Hints about an error that a rounding explains."""


def _finite_and_wrong(e: Evidence) -> bool:
    return e.comparison.all_finite and not e.comparison.right and not e.in_graph


def _in_prompts(e: Evidence) -> bool:
    """True if rows of requests with several rows are wrong, and finite, in a step whose rows follow each other."""
    several = max((request.new for request in e.step.requests), default=0) > 1
    return several and _recurs(e) and not e.branches and e.comparison.all_finite and not e.comparison.right


def _recurs(e: Evidence) -> bool:
    return e.schedule.case.state is not None and e.schedule.case.state.recurs


def _first_rows(e: Evidence) -> dict[int, int]:
    """Wrong request -> its first wrong row."""
    data = e.expected.data
    found: dict[int, int] = {}
    for row in e.rows:
        found.setdefault(int(data.row_request[row]), int(data.row_offset[row]))
    return found


def _chunk(e: Evidence) -> int:
    """Rows of a chunk if each wrong request is right in its first chunk, and wrong from the next on; else 0."""
    first, counts = _first_rows(e), [request.new for request in e.step.requests]
    for rows in CHUNKS:
        longer = {request for request, count in enumerate(counts) if count > rows}
        if set(first.values()) == {rows} and set(first) == longer:
            return rows
    return 0


def _slips(e: Evidence) -> Iterator[tuple[str, int, ChunkSlip]]:
    """Mistakes that agree with the first wrong rows, the number of rows of a chunk, and the state that is wrong."""
    if rows := _chunk(e):
        begins = f"the state at the end of a chunk of {rows} rows"
        for slip, what in HANDED_ON.items():
            yield f"{begins} {what}: the result is right for a backend that does so", rows, slip
    elif min(_first_rows(e).values(), default=0) > 0:
        most = max(request.new for request in e.step.requests)
        for rows in (*(rows for rows in CHUNKS if rows < most), max(most, CHUNKS[0])):
            yield _ROW_BEFORE, rows, "row before"


_ROW_BEFORE = (
    "the strict mask of a chunk is off by one: what a row overwrites lacks the row right before it (rows s < t - 1 in "
    "place of s < t). The result is right for a backend that does so"
)


@hint(Level.ANSWER, when=_in_prompts, silences=("first_wrong_row", "decays_that_are_right"), family="recurrent")
def mistake_of_chunks(e: Evidence) -> str:
    """The wrong rows are right for a usual mistake of kernels that compute prompts in chunks."""
    data = cast(StateStepData, e.expected.data)
    if max(data.news) > _LONGEST or data.before is not None or data.layers[0].levels:
        return ""
    wrong, out = e.comparison.wrong.any(-1), e.comparison.out.double()
    error = (out - e.expected.attention)[wrong].square().sum()
    for text, rows, slip in _slips(e):
        found = recur(replace(data, mistake=ChunkMistake(rows, slip)))
        off = (out - found.out).abs()
        # Limits of exact data are wide, so the answer has to explain most of the error as well.
        if bool((off <= found.out_limit)[wrong].all()) and bool(off[wrong].square().sum() < _UNEXPLAINED * error):
            return text
    return ""


_UNEXPLAINED = 0.1
"""Part of the squared error that rounding may leave."""


def _narrow_gates(data: StateStepData) -> Iterator[tuple[str, StateStepData]]:
    """Factors of GDN and KDA that are rounded to the dtype of the model, and data whose right factors are those."""
    dtype = DTYPES[data.dtype]
    gates = [gates_of_rows(layer, index, data) for index, layer in enumerate(data.layers)]
    betas = torch.stack([beta for _, _, beta in gates]).to(dtype).double().squeeze(-1)
    # ``gates_of_rows`` makes the rounded factors of these numbers.
    yield "beta, the factor of an update (a sigmoid),", replace(data, v=torch.logit(betas.clamp(max=1.0)))
    logs = [decay.log().to(dtype).double() for decay, _, _ in gates]
    if all(layer.lower_bound is None for layer in data.layers):
        rows = [_row_of(layer, log) for layer, log in zip(data.layers, logs, strict=True)]
        yield "g, the logarithm of the decay,", replace(data, k=torch.stack(rows))


def _row_of(layer: StateLayer, log: torch.Tensor) -> torch.Tensor:
    """[T, n] float64: elements of ``a`` that give the logarithms [T, Hv, 1 or K] of a decay."""
    assert layer.A_log is not None
    assert layer.dt_bias is not None
    step = -log / layer.A_log.double().exp().view(1, -1, 1)
    row = torch.where(step > 20, step, torch.log(torch.expm1(step))) - layer.dt_bias.double().view(1, log.shape[1], -1)
    return row.flatten(1)


@hint(Level.ANSWER, when=_finite_and_wrong, silences=_OF_ROUNDING, family="recurrent")
def gates_in_the_models_dtype(e: Evidence) -> str:
    """The wrong rows are right for one factor that is rounded to the dtype of the model."""
    data = cast(StateStepData, e.expected.data)
    kinds, longest = {layer.kind for layer in data.layers}, max(data.news, default=0)
    if not kinds <= {"gdn", "kda"} or data.dtype == "fp32" or longest > _LONGEST or data.before is not None:
        return ""
    wrong, out, want = e.comparison.wrong.any(-1), e.comparison.out.double(), e.expected.attention
    for name, rounded in _narrow_gates(data):
        found = recur(rounded)
        off = (out - found.out).abs()
        if bool((off <= found.out_limit)[wrong].all()) and _moves_with(out - want, found.out - want, found.out_limit):
            return (
                f"{name} is probably rounded to {data.dtype}, the dtype of the model, as by a buffer of that dtype: "
                "the result is right for that"
            )
    return ""


def _moves_with(error: torch.Tensor, supposed: torch.Tensor, limit: torch.Tensor) -> bool:
    """True if errors follow those that a mistake makes, element by element, as they hardly do by chance. All other
    roundings are in them, too, so no single one shows it. [L, T, Hv, V] float64 each."""
    error, supposed = error / limit, supposed / limit
    together, alone = float((error * supposed).sum()), float(supposed.square().sum())
    size, count = float(error.square().sum()), int((supposed != 0).sum())
    if not alone or not size:
        return False
    follows = together / (alone * size) ** 0.5
    return abs(together / alone - 1) < _AS_LARGE and follows * count**0.5 > _DEVIATIONS


_AS_LARGE, _DEVIATIONS = 0.25, 10.0
"""Largest difference of an error from the supposed one, as a part of it and on average, and fewest standard deviations
by which it has to follow that one."""


@hint(Level.PATTERN, when=_in_prompts, family="recurrent")
def first_wrong_row(e: Evidence) -> str:
    """Rows of each request are right up to some row, and wrong after it."""
    first, counts = _first_rows(e), [request.new for request in e.step.requests]
    if rows := _chunk(e):
        return (
            f"each request is right up to row {rows - 1} and wrong from row {rows} on, the first row of its second "
            f"chunk if chunks have {rows} rows: look at the state that a chunk hands to the next one, and at its decay"
        )
    row = min(first.values(), default=0)
    if not 0 < row < CHUNKS[-1] or (len(first) < 2 and min(counts) <= row):
        return ""
    if len(first) < len([count for count in counts if count > row]) and len(e.rows) < _FEWEST_ROWS:
        return ""
    right = "row 0" if row == 1 else f"rows 0..{row - 1}"
    return (
        f"{right} of each request {'is' if row == 1 else 'are'} right, and later rows are wrong: look at what a row "
        "reads of the rows before it in its chunk, which is the mask within a chunk and the decay between two rows"
    )


_FEWEST_ROWS = 3


@hint(Level.PATTERN, silences=("decays_that_are_right", "first_wrong_row"), family="recurrent")
def only_values_beyond_fp16(e: Evidence) -> str:
    """Only the head is wrong whose values are beyond the range of fp16."""
    heads = e.comparison.wrong.any(-1).flatten(0, 1).any(0)
    if not has_values_beyond_fp16(e.schedule.case, e.step.data) or len(heads) < 2 or not heads[0] or heads[1:].any():
        return ""
    return (
        "only head 0 is wrong, whose values in this case are beyond the range of fp16 (65,504): an input, a product or "
        "a state probably passes through fp16"
    )


@hint(Level.PLACE, when=lambda e: e.changed is not None and _recurs(e), family="recurrent")
def decays_that_are_right(e: Evidence) -> str:
    """The case is right with data of other decays."""
    assert e.changed is not None
    own = e.schedule.case.data
    tried = [data for data in STATE_DATA if data in _DECAY_ALIKE or data == own]
    found = {data: False if data == own else e.changed.right_with_data(data) for data in tried}
    right = {data for data, answer in found.items() if answer}
    wrong = {data for data, answer in found.items() if answer is False}
    # No other data may be known to be right, as in a step that continues another one.
    reading = _reading(right, wrong) if right else ""
    return reading and f"the case passes with data of {_named(right)}, and fails with {_named(wrong)}: {reading}"


_ONE = frozenset({"no_decay", "unit_keys"})
"""Patterns in which the decay is exactly 1."""
_FORGETS = frozenset({"strong_decay"})
"""Pattern in which a token forgets all that was before it."""
_DECAY_ALIKE = frozenset(STATE_DATA) - {EXACT_GATES, NEAR_EPSILON, FAIR_ROUNDING}
"""Patterns that are tried: the rows of a head have decays of one kind."""


def _named(data: set[str]) -> str:
    listed = [each for each in STATE_DATA if each in data]
    return " and ".join(filter(None, [", ".join(listed[:-1]), listed[-1]]))


def _reading(right: set[str], wrong: set[str]) -> str:
    """Interpretation of right and wrong patterns; empty if it is not known."""
    if wrong == {EXACT_GATES}:
        return (
            "only a row whose decay differs from those next to it shows it, so look at the rows that a product of "
            "decays within a chunk includes: at its first and last row, and at the row of an output"
        )
    if wrong == {NEAR_EPSILON}:
        return (
            "only queries and keys that are as short as the epsilon of their norm show it, so look at that epsilon: "
            "the divisor is sqrt(sum of squares + 1e-6)"
        )
    between = _DECAY_ALIKE - _ONE - _FORGETS
    if right >= _ONE | _FORGETS and wrong >= between - {"weak_decay"}:
        return (
            "the result is right if the decay is exactly 1 or 0, so a decay between them is missing, or is that of "
            "another row"
        )
    if right >= _ONE and not wrong & _ONE and wrong:
        return "the result is right if nothing decays, so a decay is wrong"
    if wrong == {"like_keys"} or right == {"strong_decay", "unit_keys"}:
        return (
            "only keys that are not orthogonal show it, so look at what a token overwrites of the tokens before it "
            "(the delta rule)"
        )
    if right == _FORGETS:
        return "the result is right if a token forgets all before it, so what a row reads of earlier tokens is wrong"
    return ""
