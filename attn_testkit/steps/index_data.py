"""The data of an indexer in a step: index keys by slot, queries and weights by row, and memory of the index pool.

Exact data are small whole numbers: sums of products are exact in float32, and in the narrower sums of FP8 tensor cores
too. The last selected key of a row and the first omitted one have different scores, so only one selection is right.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from cachetools import LRUCache, cached

from ..cases.case import Case
from ..cases.indexing import NEAR
from ..contract import INDEX_WIDTH, IndexPool
from .data import (
    DTYPES,
    KEPT_BYTES,
    StepData,
    bytes_in,
    make_step_data,
    numbers_of,
    offsets_in_chunk,
    whole_with_selections,
)
from .schedule import Ints, Schedule, Step

_TRIES = 200
_GAUSS = 3.0
_VECTORS_OF_TIES = 9
_NEAR_KEYS, _NEAR_QUERIES, _NEAR_GATES = (9, 15), (1, 4), (1, 5)
"""Bounds of data whose scores are close to each other: a sum of 127 positive products has a standard deviation of 1.3
%. Adjacent FP8 numbers are different."""
_FULL, _MANTISSA_BITS = 7 / 8, 3
"""Part of the near scores of a row that are in one bin, and bits of the mantissa that bins of radix selects have."""
_EARLY_OR_LATE, _FEW, _MANY = 1 / 5, 8, 4
"""Part of the keys at each end of a request of which one is selected; least top-k for which that is asked; least number
of keys per selected one, since no bin overflows in a shorter request."""
_LARGE_GATES = 2.0**13
"""Factor of the gates of every second row of exact data, a power of two, so that order and exactness stay. Half of the
scores of such a row are negative, and many are below -65504, the smallest number of FP16 (cudnn-frontend #445)."""
_SCALED = -2
"""Number of a query that makes its scale a power of two, if the backend quantizes queries; that of a key is 0."""
_NEARLY = slice(255, None, 511)
"""Number of slots whose keys are nearly equal to others, in data of ties."""


@dataclass(frozen=True, eq=False)
class IndexData:
    """Host tensors of one step. T live rows, packed request by request; S slots of the schedule."""

    q: torch.Tensor
    """[L, T, heads, 128] e4m3."""
    weights: torch.Tensor
    """[L, T, heads] float32."""
    k: torch.Tensor
    """[L, T, 128] in the model's dtype: the new index keys."""
    by_slot: torch.Tensor
    """[L, S, 128] in the model's dtype: the index key of each slot that a request owns."""
    slots: tuple[Ints, ...]
    """Slots of the keys of each request."""
    first: bool = False
    """True if only the first row of a request selects, and its others use that selection: later forwards of a draft."""

    def offsets(self, data: StepData) -> torch.Tensor:
        """[T] int64: offset of the row whose query selects for each row, and which sees the keys that compete."""
        return data.row_offset * (not self.first)

    def stored(self, data: StepData) -> torch.Tensor:
        """[n] int64: rows whose index keys are stored."""
        return (data.row_offset == self.offsets(data)).nonzero()[:, 0]


def index_layers(case: Case) -> list[int]:
    """Layers that have index keys."""
    assert case.indexer is not None
    return [layer for layer in range(case.layers.count) if case.indexer.source(layer) == layer]


def selects_once(case: Case) -> bool:
    """True if later forwards of a draft use the selection of the first one."""
    return case.indexer is not None and case.indexer.first and case.draft is not None


def scale_of(case: Case) -> str:
    """The convention of scales, one of ``INDEX_SCALES``."""
    return "power_of_two" if case.indexer and case.indexer.pow2 else "amax"


def _keys(case: Case, slots: int, rng: np.random.Generator) -> torch.Tensor:
    """[L, slots, 128] float32."""
    found = _numbers_of_keys(case, slots, rng)
    if case.indexer and case.indexer.rotates != "none":
        found[..., _SCALED] = 0
    return found


def _numbers_of_keys(case: Case, slots: int, rng: np.random.Generator) -> torch.Tensor:
    assert case.indexer is not None
    layers = case.layers.count
    if case.indexer.data == "gauss":
        return torch.from_numpy(rng.standard_normal((layers, slots, INDEX_WIDTH), np.float32) * np.float32(_GAUSS))
    if case.indexer.data == NEAR:
        near = rng.integers(*_NEAR_KEYS, (layers, slots, INDEX_WIDTH), np.int8).astype(np.float32)
        near[..., -1] = 448
        return torch.from_numpy(near)
    numbers = rng.integers(-4, 5, (layers, slots, INDEX_WIDTH), np.int8).astype(np.float32)
    # The largest number makes the scale a power of two, and queries have 0 there.
    numbers[..., -1] = 448 * rng.choice((-1, 1), (layers, slots))
    numbers *= np.exp2(rng.integers(-2, 3, (layers, slots, 1), np.int8)).astype(np.float32)
    if case.indexer.data == "ties":
        same = rng.integers(_VECTORS_OF_TIES, size=slots)
        numbers = numbers[:, same]
        # A few keys are a little better or worse than thousands of equal ones: where the bin of the last selected score
        # overflows, a selection loses the best of it (sglang #37625, vLLM #55314).
        numbers[:, _NEARLY, 0] += np.abs(numbers[:, _NEARLY, -1]) / 448
    return torch.from_numpy(numbers)


def _queries(case: Case, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """[rows, heads, 128] and [rows, heads], float32."""
    q, weights = _numbers_of_queries(case, rows, rng)
    if case.indexer and case.indexer.rotates != "none":
        q[..., _SCALED] = 448
    return q, weights


def _numbers_of_queries(case: Case, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    assert case.indexer is not None
    shape = (rows, case.indexer.heads)
    if case.indexer.data == "gauss":
        return rng.standard_normal((*shape, INDEX_WIDTH), np.float32), rng.standard_normal(shape, np.float32)
    if case.indexer.data == NEAR:
        q = rng.integers(*_NEAR_QUERIES, (*shape, INDEX_WIDTH), np.int8).astype(np.float32)
        q[..., -1] = 0
        return q, rng.integers(*_NEAR_GATES, shape).astype(np.float32) / np.float32(8)
    q = rng.integers(-3, 4, (*shape, INDEX_WIDTH), np.int8).astype(np.float32)
    q[..., -1] = 0
    # Gates are those of a linear layer, so some are negative.
    return q, rng.choice(np.array([-2, -1, 1, 2, 3, 4], np.float32), shape) / np.float32(8)


def _is_tied(q: np.ndarray, weights: np.ndarray, keys: np.ndarray, topk: int) -> bool:
    """True if the last selected key of a row has the score of one that is not selected. ``keys`` [n, 128]."""
    if len(keys) <= topk:
        return False
    scores = weights @ np.maximum(q @ keys.T, 0)
    ordered = np.sort(scores)[::-1]
    return bool(ordered[topk - 1] == ordered[topk])


def _misses_the_bin(q: np.ndarray, weights: np.ndarray, keys: np.ndarray, topk: int) -> bool:
    """True if no bin of a radix select has nearly all scores of a row, or if a bin that is too small could lose keys at
    one end of the request without losing a selected one. ``keys`` [n, 128].
    """
    if len(keys) < _MANY * topk:
        return False
    scores = weights @ np.maximum(q @ keys.T, 0)
    bins = scores.astype(np.float32).view(np.uint32) >> (23 - _MANTISSA_BITS)
    if np.unique(bins, return_counts=True)[1].max() < _FULL * len(keys):
        return True
    best, end = np.argsort(scores)[-topk:], int(len(keys) * _EARLY_OR_LATE)
    return topk >= _FEW and not (best.min() < end and best.max() >= len(keys) - end)


def make_index_data(schedule: Schedule, step: Step) -> IndexData:
    """Draw a step's numbers. Some requests of a step, and one chunk of it, have the data of the whole step."""
    whole = step.part_of[0] if step.part_of else step
    all_chunks = whole_with_selections(schedule.case, whole)
    drawn = _drawn(schedule, all_chunks or whole)
    if all_chunks is not None:
        data = make_step_data(schedule, all_chunks)
        drawn = _rows(drawn, offsets_in_chunk(data, all_chunks, whole) >= 0)
    if step.part_of:
        of_row = make_step_data(schedule, whole).row_request
        drawn = _rows(drawn, torch.cat([(of_row == index).nonzero()[:, 0] for index in step.part_of[1]]))
    return replace(drawn, slots=tuple(request.slots for request in step.requests))


def _rows(data: IndexData, rows: torch.Tensor) -> IndexData:
    q = data.q.view(torch.uint8)[:, rows].view(data.q.dtype)
    return replace(data, q=q, weights=data.weights[:, rows], k=data.k[:, rows])


@cached(LRUCache(KEPT_BYTES, getsizeof=bytes_in), key=numbers_of, lock=threading.Lock())
def _drawn(schedule: Schedule, step: Step) -> IndexData:
    case = schedule.case
    assert case.indexer is not None
    assert case.selection is not None
    rng = np.random.default_rng(step.seed ^ 0x1D)
    by_slot = _keys(case, (schedule.num_pages + 1) * case.page_size, rng).to(DTYPES[case.dtype])
    rows, layers = step.tokens, case.layers.count
    q = np.empty((layers, rows, case.indexer.heads, INDEX_WIDTH), np.float32)
    weights = np.empty(q.shape[:3], np.float32)
    data = make_step_data(schedule, step)
    for layer in range(layers):
        q[layer], weights[layer] = _queries(case, rows, rng)
        if not case.indexer.is_exact and case.indexer.data != NEAR:
            continue
        refused = _is_tied if case.indexer.is_exact else _misses_the_bin
        keys = by_slot[layer].float().numpy()
        for row, (of, offset) in enumerate(zip(data.row_request.tolist(), data.row_offset.tolist(), strict=True)):
            own = step.requests[of]
            if refused is _misses_the_bin and offset < own.new - 1:
                continue  # one row of a request is enough
            seen = keys[own.slots[data.visible[of, offset, : len(own.slots)].numpy()]]
            for _ in range(_TRIES):
                if not refused(q[layer, row], weights[layer, row], seen, case.selection.topk):
                    break
                q[layer, row : row + 1], weights[layer, row : row + 1] = _queries(case, 1, rng)
            else:
                raise AssertionError(f"{case.id}: no query of {_TRIES} has scores of the kind that the case needs")
    if case.indexer.is_exact:
        weights[:, ::2] *= _LARGE_GATES
    if selects_once(case):
        of_first = (torch.arange(rows) - data.row_offset).numpy()
        q, weights = q[:, of_first], weights[:, of_first]
    return IndexData(
        torch.from_numpy(q).to(torch.float8_e4m3fn),
        torch.from_numpy(weights),
        by_slot[:, data.out_cache_loc],
        by_slot,
        tuple(request.slots for request in step.requests),
        selects_once(case),
    )


@lru_cache(maxsize=2)  # large; each check asks, and so does a step that is repeated at once
def index_memory(schedule: Schedule, step: Step, *, after: bool) -> torch.Tensor:
    """[layers with index keys, pages, 64 * 132] uint8: the index pool before or ``after`` a step. Not to be written.

    Keys and scales of tokens that no live request owns are NaN.
    """
    case = schedule.case
    assert case.indexer is not None
    layers = index_layers(case)
    pool = IndexPool((schedule.num_pages + 1) * case.page_size, layers, scale_of(case), torch.device("cpu"))
    pool.memory.fill_(0xFF)
    by_slot = make_index_data(schedule, step).by_slot
    new = [after * (1 if selects_once(case) else request.new) for request in step.requests]
    owned = [each.slots[: each.prefix + count] for each, count in zip(step.requests, new, strict=True)]
    live = torch.zeros(by_slot.shape[1], dtype=torch.bool)
    for each in owned:
        live[torch.from_numpy(each)] = True
    slots = live.nonzero()[:, 0]
    for layer in layers:
        pool.store(layer, slots, by_slot[layer, slots])
    return pool.memory
