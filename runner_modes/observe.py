"""Host copies of a step's results, in one transfer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from attn_testkit.checks.observation import Bytes, Group, Observation, Piece, RanBefore, copies_from
from attn_testkit.checks.places import as_numbers
from attn_testkit.contract import ForwardMode
from attn_testkit.graphs.poison import Canaries
from attn_testkit.model import Model, Trace
from attn_testkit.watches.packing import Sent
from attn_testkit.watches.past_modes import past_modes

from .harness import ServerHarness, StagedStep
from .mode_runner import ModeRunner, Rows


@dataclass(frozen=True, eq=False)
class Readable:
    """A tensor that a forward of the model produced, as bytes on the device."""

    group: Group
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    raw: torch.Tensor = field(repr=False)
    """Bytes of the tensor, [n] uint8."""
    row: int
    """Number of bytes of one row."""
    sent: tuple[int | slice, slice] | None = None
    """Layers and bytes of ``StagedStep.rows`` that it still holds, if nobody modified it."""


_RETURNED = (
    ("next_token_logits", "logits"),
    ("hidden_states", "hidden"),
    ("topk_p", "topk_p"),
    ("topk_index", "topk_index"),
)
"""Fields of ``Outputs`` and of a trace."""


def readable(model: Model, trace: Trace) -> tuple[Readable, ...]:
    """Everything that is checked, all rows. Outputs of a graph stay in the same memory at every replay."""
    with past_modes():
        return tuple(_readables(model, trace))


def _readables(model: Model, trace: Trace) -> Iterator[Readable]:
    for layer, out in enumerate(trace.attention):
        yield _readable("attention", str(layer), out)
    yield _readable("activations", "packed 0", trace.packed, (slice(None), slice(None)))
    # q, k and v of each layer, where they were copies of the packed rows.
    for index, dense in enumerate(trace.dense):
        layer, part = divmod(index, 3)
        if not dense.shape[-1]:
            continue
        place = layer, model.bytes_of_parts[layer][part]
        yield _readable("activations", f"{'qkv'[part]} {layer}", dense, place)
    for layer, lse in enumerate(trace.lse):
        yield _readable("lse", str(layer), lse)
    for layer, finite in enumerate(trace.part_finite):
        yield _readable("finite parts", str(layer), finite)
    for layer, keys in trace.selections.items():
        yield _readable("selected", str(layer), keys)
    for index, memory in enumerate(trace.beside_out):
        where, of = ("before", "behind")[index % 2], model.layers[index // 2 % len(model.layers)].layer_id
        yield _readable("beside", f"memory {where} out of layer {of}", memory)
    for name, attribute in _RETURNED:
        value = getattr(trace, attribute)
        if value is not None:
            yield _readable("outputs", name, value)


def _readable(group: Group, name: str, tensor: torch.Tensor, sent: tuple[int | slice, slice] | None = None) -> Readable:
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    row = math.prod(shape[1:]) * dtype.itemsize
    return Readable(group, name, dtype, shape, tensor.view(-1).view(torch.uint8), row, sent)


def observe(
    harness: ServerHarness,
    driver: ModeRunner,
    staged: StagedStep,
    produced: Sequence[Readable],
    given: Sequence[Sent],
    *,
    label: str = "",
    replay: bool = False,
    padded: int = 0,
    canaries: Canaries | None = None,
    ran_before: RanBefore = "",
) -> Observation:
    """Copy the results of a step to the host, with slots of the KV pool and inputs that changed, and deliver them.

    ``given``: inputs that the step may not write.
    """
    misplaced = harness.wrong_in(staged)
    looks = [
        each.watch.look(staged.slots, slots, len(slots))
        for each, slots in zip(harness.memories, staged.due_on_device, strict=True)
        if harness.copies_pool
    ]
    index = harness.index.look() if harness.index and staged.schedule.case.indexer else ()
    state = canaries.extremes() if canaries is not None else ()
    found = _copied(
        [
            *((each.raw, each.shape[0] * each.row) for each in produced),
            *((each.memory, len(each.before)) for each in given),
            *(each for look in looks for each in look),
            *index,
            *state,
        ]
    )
    bs = staged.step.bs + padded
    live, returned = driver.live_rows(staged, bs), driver.returned_rows(staged, bs)
    pieces: list[Piece] = []
    checks_padding = _padding_must_be_finite(harness, staged, replay=replay)
    for each in produced:
        if each.group == "beside":
            pieces += _overwritten(each, next(found), harness.fill)
            continue
        whole = next(found)
        piece = _rows(each, whole, returned if each.group == "outputs" else live)
        if each.group == "attention" and checks_padding:
            pieces += _of_no_request(each, whole, live)
        # As with other inputs, only modified tensors are sent.
        if each.sent is None or not np.array_equal(piece.raw, _sent(staged, each.sent)):
            pieces.append(piece)
    pieces += [piece for each in given for piece in _changed(each, next(found))]
    for memory, due, look in zip(harness.memories, staged.due, looks, strict=False):
        pieces += memory.pieces(due, [next(found) for _ in look])
    if harness.index and index:
        pieces += harness.index.changes(next(found))
    if misplaced:
        wrong = as_numbers(misplaced)
        raw = wrong.reshape(-1).view(torch.uint8).numpy()
        pieces.append(Piece("moved", "wrong", wrong.dtype, tuple(wrong.shape), raw))
    damaged = canaries.damaged(next(found)) if canaries is not None and state else ()
    observed = Observation(
        staged.schedule,
        staged.step,
        label,
        copies_from(pieces),
        ran_before,
        damaged=damaged,
        replay=replay,
        padded=padded,
    )
    return harness.deliver(observed)


def _copied(memories: Sequence[tuple[torch.Tensor | Bytes, int]]) -> Iterator[Bytes]:
    """Copy bytes of memory and their number to the host: those on the device come in one transfer."""
    on_device = [each for each, _ in memories if isinstance(each, torch.Tensor)]
    together, start = torch.cat(on_device).cpu().numpy(), 0
    for each, size in memories:
        if isinstance(each, torch.Tensor):
            yield together[start : start + size]
            start += size
        else:
            yield each


def _overwritten(produced: Readable, now: Bytes, poison: int) -> Iterator[Piece]:
    """Poisoned memory that must not be written, before and now, if it changed."""
    if (now != poison).any():
        shape = (len(now),)
        yield Piece("before", produced.name, torch.uint8, shape, np.full(shape, poison, np.uint8))
        yield Piece("now", produced.name, torch.uint8, shape, now)


def _rows(produced: Readable, found: Bytes, rows: Rows) -> Piece:
    """Select rows of a tensor that was read."""
    mine = found.reshape(-1, produced.row)[rows]
    return Piece(produced.group, produced.name, produced.dtype, (len(mine), *produced.shape[1:]), mine.reshape(-1))


def _padding_must_be_finite(harness: ServerHarness, staged: StagedStep, *, replay: bool) -> bool:
    """True if the backend declares it, and the inputs of all rows of no request are finite.

    They are not finite if the rows are NaN, or have stale slots, which may be unowned by now; if padding is not stored
    and a padded request attends to page 0 as it was, or has more keys than slot 0, the only stored one; or if the rows
    select any keys. The kit merges KV splits itself.
    """
    declared, step = harness.capabilities, staged.step
    if not declared.server.finite_padding or step.stored or harness.context.kv_splits:
        return False
    if declared.sparse is not None and declared.sparse.any_padding:
        return False
    case = staged.schedule.case
    # Rows of target-verify see the drafts after seq_lens, too: page 0 of a page table has more keys than slot 0.
    one_key = case.mode is not ForwardMode.TARGET_VERIFY or case.page_size == 1
    stored = harness.padding_slot(step.index) == 0 and one_key
    return not replay or (step.padding not in ("nan", "stale") and (stored or harness.pads_with_nothing))


def _of_no_request(produced: Readable, found: Bytes, live: Rows) -> Iterator[Piece]:
    """Flags of the rows that belong to no request, [n] bool: True for finite ones; None if there are no such rows."""
    of_none = np.ones(produced.shape[0], dtype=np.bool_)
    of_none[live] = False
    if of_none.any():
        values = torch.from_numpy(found.reshape(-1, produced.row)[of_none]).view(produced.dtype)
        finite = values.isfinite().all(1)
        yield Piece("padding", produced.name, torch.bool, tuple(finite.shape), finite.numpy().view(np.uint8))


def _sent(staged: StagedStep, part: tuple[int | slice, slice]) -> Bytes:
    """Bytes that were sent, [T * bytes]."""
    rows: Bytes = staged.rows[:, part[0], part[1]].reshape(-1)
    return rows


def _changed(given: Sent, now: Bytes) -> Iterator[Piece]:
    """Inputs that changed, before and now."""
    for place, was, is_ in given.changed(now):
        yield Piece("before", place.name, place.dtype, place.shape, was)
        yield Piece("now", place.name, place.dtype, place.shape, is_)
