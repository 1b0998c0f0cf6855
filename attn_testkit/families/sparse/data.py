"""The data of a step of sparse attention: data of softmax attention, and the selected keys of each row and layer.

Each row of each layer has its own selection, by its own pattern.

Short contexts hide bugs of sparse attention, because all keys are selected. So a row that may see more than ``topk``
keys selects ``topk`` of them, or one; patterns leave out the newest keys, the oldest, the row's own, or most.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from cachetools import LRUCache, cached

from ...cases.features.server.table import variant_of
from ...cases.selection import Selection
from ...steps.data import (
    KEPT_BYTES,
    StepData,
    make_layers,
    make_step_data,
    numbers_of,
    offsets_in_chunk,
    whole_with_selections,
)
from ...steps.index_data import make_index_data
from ...steps.kv_groups import slot_map
from ...steps.schedule import Schedule, Step

_Ints = npt.NDArray[np.int64]
_PATTERNS = ("newest", "oldest", "strided", "both ends", "scattered", "not its own", "one")


def _chosen(visible: _Ints, own: int, topk: int, pattern: str, rng: np.random.Generator) -> _Ints:
    """Selects at most ``topk`` of ``visible`` [n] ascending, with the row's ``own`` key; returned in listed order."""
    if len(visible) <= topk:
        return rng.permutation(visible)
    if pattern == "newest":
        return visible[-topk:]
    if pattern == "oldest":
        return visible[:topk]
    if pattern == "strided":
        return visible[np.linspace(0, len(visible) - 1, topk).astype(np.int64)]
    if pattern == "both ends":
        head = topk // 2
        return np.concatenate([visible[:head], visible[len(visible) - topk + head :]])
    if pattern == "one":
        return visible[rng.integers(len(visible), size=1)]
    return rng.choice(visible[visible != own] if pattern == "not its own" else visible, topk, replace=False)


def _chosen_blocks(visible: _Ints, at: int, selection: Selection, pattern: str, rng: np.random.Generator) -> _Ints:
    """Selects at most ``topk`` blocks of the positions ``visible``, that of the row's position ``at`` first of all."""
    blocks, own = np.unique(visible // selection.block), at // selection.block
    if selection.without_own_block:
        chosen = _chosen(blocks, own, selection.topk, pattern, rng)
        return np.sort(chosen) if selection.space == "pages" else rng.permutation(chosen)
    others, most = blocks[blocks != own], selection.topk - 1
    if len(others) > most:
        others = _chosen(others, int(others[-1]), most, pattern, rng) if most else others[:0]
    found = rng.permutation(np.append(others, own))
    if selection.space == "pages":
        return np.sort(found)
    if not selection.holes:
        return found
    # Holes take what is last.
    return np.append(own, found[found != own])


def _listed(keys: _Ints, selection: Selection, rng: np.random.Generator) -> _Ints:
    """[topk] with -1 in unused columns: after the keys, or with holes anywhere, even first."""
    row = np.full(selection.topk, -1, np.int64)
    if not selection.holes or selection.topk == 1:
        row[: len(keys)] = keys
        return row
    # A full row loses some of its keys to the holes.
    keys = keys[: selection.topk - max(1, selection.topk // 8)]
    row[np.sort(1 + rng.choice(selection.topk - 1, len(keys), replace=False))] = keys
    return row


@cached(LRUCache(KEPT_BYTES, getsizeof=lambda keys: keys.nbytes), key=numbers_of, lock=threading.Lock())
def _selected_keys(schedule: Schedule, step: Step) -> torch.Tensor:
    """[L, T, topk] or [L, T, Hk, topk] int64: keys that each live row selects, as positions in its request along S, or
    blocks; -1: none. A part of a step, and a causal chunk of it, have the selections of the whole step. If layers are
    not causal, rows of the whole step select keys of later chunks, which a chunk cannot attend to. Its selections are
    then drawn for the chunk by itself.
    """
    selection, layers = schedule.case.selection, schedule.case.layers.count
    assert selection is not None
    if step.part_of is not None:
        whole, indices = step.part_of
        of_row = make_step_data(schedule, whole).row_request
        return _selected_keys(schedule, whole)[:, torch.cat([(of_row == index).nonzero()[:, 0] for index in indices])]
    if (all_chunks := whole_with_selections(schedule.case, step)) is not None:
        data = make_step_data(schedule, all_chunks)
        return _selected_keys(schedule, all_chunks)[:, offsets_in_chunk(data, all_chunks, step) >= 0]
    heads = schedule.case.heads.kv_heads if selection.per_kv_head else 1
    shape = make_layers(schedule.case)[0].selected_shape
    if not step.requests:
        return torch.empty(layers, 0, *shape, dtype=torch.int64)
    data = make_step_data(schedule, step)
    rng = np.random.default_rng(step.seed ^ 0x5E1)
    found = np.empty((layers, step.tokens, heads, selection.topk), np.int64)
    turn = int(rng.integers(len(_PATTERNS)))
    for row, (request, offset) in enumerate(zip(data.row_request.tolist(), data.row_offset.tolist(), strict=True)):
        visible = data.visible[request, offset].nonzero()[:, 0].numpy()
        for layer, head in np.ndindex(layers, heads):
            pattern = _PATTERNS[(turn + row + 3 * layer + 5 * head) % len(_PATTERNS)]
            if selection.block > 1:
                positions = data.key_positions[request].numpy()[visible]
                chosen = _chosen_blocks(positions, int(data.positions[row]), selection, pattern, rng)
            else:
                chosen = _chosen(visible, int(data.row_key[row]), selection.topk, pattern, rng)
            found[layer, row, head] = _listed(chosen, selection, rng)
    if selection.empty_rows:
        # One row of each layer, and not the same one. Of the row after it one KV head selects no key.
        for layer in range(layers):
            found[layer, (turn + layer) % step.tokens] = -1
            if heads > 1:
                found[layer, (turn + layer + 1) % step.tokens, (turn + layer) % heads] = -1
    return torch.from_numpy(found).view(layers, step.tokens, *shape)


def make_sparse_data(schedule: Schedule, step: Step, pattern: str | None = None) -> StepData:
    """Draw a step's numbers, as ``make_step_data`` does, with ``allowed`` and ``selected``."""
    data, indexer = make_step_data(schedule, step, pattern), schedule.case.indexer
    if indexer and indexer.is_exact:
        # The backend selects, and only the answer knows what (``index_scores.py``).
        assert schedule.case.selection is not None
        none = torch.full((schedule.case.layers.count, len(data.positions), schedule.case.selection.topk), -1)
        return replace(data, selected=none.to(torch.int32), index=make_index_data(schedule, step))
    keys = _selected_keys(schedule, step)
    block = schedule.case.selection.block if schedule.case.selection else 1
    return replace(data, allowed=attended_by(data, keys, block), selected=_indices(schedule, step, data, keys))


def attended_by(data: StepData, keys: torch.Tensor, block: int = 1) -> torch.Tensor:
    """[L, B, Tmax, S] bool: the keys of each row. ``keys`` [L, T, topk] int64: positions along S, or numbers of blocks
    of ``block`` keys, of which a row attends to those that it may see; -1: none. [L, B, Tmax, H, S] for ``keys``
    [L, T, H, topk] of H heads.
    """
    if keys.dim() > data.visible.dim():
        return torch.stack([attended_by(data, each, block) for each in keys.unbind(2)], 3)
    if block > 1:
        of_key = data.key_positions // block
        listed = torch.zeros(*keys.shape[:2], int(of_key.max()) + 2 if of_key.numel() else 1, dtype=torch.bool)
        listed.scatter_(2, keys.clamp(max=listed.shape[2] - 2) % listed.shape[2], True)
        # An index of -1 has marked the last column, in which no key is.
        rows = listed.gather(2, of_key[data.row_request].expand(len(keys), -1, -1))
        found = torch.zeros(len(keys), *data.visible.shape, dtype=torch.bool)
        found[:, data.row_request, data.row_offset] = rows
        return found & data.visible
    allowed = torch.zeros(len(keys), *data.visible.shape, dtype=torch.bool)
    layer, row, column = (keys >= 0).nonzero(as_tuple=True)
    allowed[layer, data.row_request[row], data.row_offset[row], keys[layer, row, column]] = True
    return allowed


def heads_with_keys(data: StepData) -> torch.Tensor:
    """[L, T, Hq] bool: True for query heads of a row that attend to a key."""
    assert data.allowed is not None
    some, heads = data.allowed.any(-1)[:, data.row_request, data.row_offset], data.q.shape[2]
    by_head = some if data.by_head else some.unsqueeze(2)
    return by_head.repeat_interleave(heads // by_head.shape[2], 2)


def visible_of(data: StepData) -> torch.Tensor:
    """``data.visible`` in the shape of ``data.allowed``."""
    assert data.allowed is not None
    return (data.visible.unsqueeze(2) if data.by_head else data.visible).expand_as(data.allowed)


def _in_pool(schedule: Schedule) -> _Ints:
    """[slots] int64: the slot of the pool that a slot of the schedule is."""
    if variant_of(schedule.case).pool_elements:
        return slot_map(schedule, 0)
    return np.arange((schedule.num_pages + 1) * schedule.case.page_size)


def _indices(schedule: Schedule, step: Step, data: StepData, keys: torch.Tensor) -> torch.Tensor:
    """``keys`` in the index space of the case, int32."""
    selection = schedule.case.selection
    assert selection is not None
    longest = data.key_positions.shape[1]
    if not keys.numel() or (selection.space == "positions" and selection.block > 1):
        return keys.to(torch.int32)
    if selection.space != "positions":
        table = np.zeros((max(step.bs, 1), max(longest, 1)), np.int64)
        for place, request in enumerate(step.requests):
            table[place, : len(request.slots)] = _in_pool(schedule)[request.slots]
        names = torch.from_numpy(table // selection.block)
    else:
        names = data.key_positions
    of_row = data.row_request.view(-1, *[1] * (keys.dim() - 2))
    found = names[of_row, keys.clamp(min=0) * selection.block]
    return torch.where(keys < 0, -1, found).to(torch.int32)
