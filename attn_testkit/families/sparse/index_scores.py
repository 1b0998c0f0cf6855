"""Scores of index keys in float64, their limits, and the keys that are selected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...contract import INDEX_WIDTH
from ...contract.index_pool import index_scales
from ...steps.data import StepData
from ...steps.index_data import IndexData, scale_of
from ...steps.schedule import Schedule

_ROUNDINGS = 8
"""Roundings of a score in addition to roundings of its sums: products with weight and scale, and the results of
sums."""


@dataclass(frozen=True, eq=False)
class RowScores:
    """Scores of the keys that one row may see, n of them, in the order of their positions."""

    row: int
    """Index into the T live rows."""
    request: int
    scores: torch.Tensor
    """[n] float64."""
    margin: torch.Tensor
    """[n] float64: the largest error of a computed score."""


def stored_index(k_index: torch.Tensor, scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, 128] float64 in units of their scales, and scales [n] float64, as an index pool holds ``k_index``."""
    scales = index_scales(k_index, scale)
    keys = (k_index.float() / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return keys.double(), scales.double()


def row_scores(
    data: StepData,
    index: IndexData,
    layer: int,
    keys: torch.Tensor,
    scales: torch.Tensor,
    *,
    unit: float = 0.0,
    relu: bool = True,
    gates: bool = True,
) -> Iterator[RowScores]:
    """Score the keys that each row may see. ``keys`` [S, 128], FP8 or float64, and ``scales`` [S] float64 by slot.

    ``unit``: rounding of the sums; 0 for data whose scores are exact. ``relu`` or ``gates`` False: mistakes, whose
    scores explain a wrong selection.
    """
    offsets = index.offsets(data)
    q, weights = index.q[layer].double(), index.weights[layer].double()
    for request, slots in enumerate(index.slots):
        rows = (data.row_request == request).nonzero()[:, 0]
        own, own_scales = keys[slots].double(), scales[slots]
        gate = weights[rows] if gates else torch.ones_like(weights[rows])
        products = q[rows] @ own.T
        scores = torch.einsum("thn,th->tn", products.relu() if relu else products, gate) * own_scales
        margin = torch.zeros_like(scores)
        if unit:
            sizes = torch.einsum("thn,th->tn", q[rows].abs() @ own.abs().T, gate.abs()) * own_scales
            margin = unit * (INDEX_WIDTH + gate.shape[1] + _ROUNDINGS) * sizes
        for place, row in enumerate(rows.tolist()):
            seen = data.visible[request, int(offsets[row]), : len(slots)]
            yield RowScores(row, request, scores[place][seen], margin[place][seen])


def best_keys(schedule: Schedule, data: StepData, index: IndexData) -> torch.Tensor:
    """[L, T, topk] int64: the keys that each row selects, as places in its request; -1: none. Exact data only."""
    case = schedule.case
    assert case.indexer is not None
    assert case.selection is not None
    topk, scale = case.selection.topk, scale_of(case)
    found = torch.full((case.layers.count, len(data.positions), topk), -1, dtype=torch.int64)
    for layer in range(case.layers.count):
        if case.indexer.source(layer) != layer:
            found[layer] = found[case.indexer.source(layer)]
            continue
        keys, scales = stored_index(index.by_slot[layer], scale)
        for each in row_scores(data, index, layer, keys, scales):
            best = each.scores.topk(min(topk, len(each.scores))).indices
            found[layer, each.row, : len(best)] = best
    return found
