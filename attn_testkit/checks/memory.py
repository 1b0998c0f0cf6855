"""Checks of memory that the kit owns: whose slots were read and written, which inputs were modified."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..cases.case import Case
from ..cases.kv_groups import slot_in_pool
from ..results import Finding
from .check import Check, Stage
from .describe import index_ranges
from .judgement import BITS
from .observation import Observation

__all__ = ["CHECKS", "inputs_unchanged", "pool_is_right", "writes_own_kv"]


def _raw(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(BITS[pool.dtype.itemsize])


def pool_is_right(observed: Observation, page_size: int) -> bool:
    """The slots behind page 0 that changed are those of the batch, and hold its K and V bit for bit.

    In page 0 padding may write. ``page_size`` in slots. What a slot held before never equals what it should hold: it
    was NaN.
    """
    assert observed.inputs is not None
    if observed.outside:
        return False
    slots, rows = observed.written
    own = slots >= page_size
    if not own.all():
        slots, rows = slots[own], rows[:, :, own]
    want_slots, want_rows = observed.inputs.new_slots, observed.inputs.new_rows
    return torch.equal(slots, want_slots) and torch.equal(_raw(rows), _raw(want_rows))


def writes_own_kv(observed: Observation, case: Case) -> list[Finding]:
    """The pool outside page 0 is bit for bit what it should be."""
    page = case.page_size
    if pool_is_right(observed, page):
        return []
    pool_after = observed.pool_after
    got, want = _raw(observed.pool)[:, :, page:], _raw(pool_after)[:, :, page:]
    differs = (got != want).flatten(3).any(-1)
    if observed.outside and not differs.any():
        return [_outside(observed)]
    owner = _owners(observed, pool_after.shape[2])[page:]
    wrong = differs.any(0).any(0)
    what = {
        "new": "a slot of this step's tokens does not hold their K and V",
        "old": "a slot of an earlier token was overwritten",
        "unowned": "a slot that no live request owns was written",
    }
    kinds = {kind: int((wrong & (owner == code)).sum()) for kind, code in _OWNER.items()}
    first = next(kind for kind in ("unowned", "old", "new") if kinds[kind])
    layer, part, slot = (int(i) for i in (differs & (owner == _OWNER[first])).nonzero()[0])
    counts = ", ".join(f"{n} {_KIND[kind]}" for kind, n in kinds.items() if n)
    shown = slot_in_pool(observed.schedule, layer, slot + page)
    behind = _rows_behind(observed, case)
    hint = _of_padding(kinds, behind)
    hint = hint or _held_instead(observed, got, want, owner, (layer, part, slot), padded=0 < kinds["new"] <= behind)
    name, of_layer = "latent" if pool_after.shape[1] == 1 else "KV"[part], case.layers.name(layer)
    return [
        Finding(
            "writes-own-kv",
            f"KV memory is wrong after the step: {what[first]}",
            where=f"{of_layer}, {name}, slot {shown} (page {shown // page}, offset {shown % page}): "
            f"{_owner_text(observed, slot + page)}",
            spread=f"slots that are wrong: {counts}",
            hint=hint,
            step=observed.label,
        )
    ]


def _outside(observed: Observation) -> Finding:
    """Every slot is right, and memory between them is not what it was."""
    return Finding(
        "writes-own-kv",
        "KV memory is wrong after the step: memory of the pool that belongs to no slot was written",
        where=f"byte {observed.outside[0]} of the memory that a KV pool of layout "
        f"{observed.schedule.case.kv_layout} lies in",
        hint="a row is stored by the strides of the pool, and no wider than it is; what is behind it may be padding",
        step=observed.label,
    )


_OWNER = {"new": 1, "old": 2, "unowned": 0}
_KIND = {"new": "of this step's tokens", "old": "of earlier tokens", "unowned": "unowned"}


def _of_padding(kinds: Mapping[str, int], behind: int) -> str:
    """Where all live rows are stored, other slots were written, and ``behind`` rows of padding are enough for them."""
    more = kinds["unowned"] + kinds["old"]
    if kinds["new"] or not 0 < more <= behind:
        return ""
    return (
        f"the new tokens lie where they should; slots written beside them: {more}; rows of padding: "
        f"{behind}. {_PADDING_GOES}"
    )


def _rows_behind(observed: Observation, case: Case) -> int:
    """Rows of padding in the graph; 0 in an eager run."""
    return observed.step.bucket * case.width - observed.step.tokens if observed.replay else 0


_PADDING_GOES = (
    "Padding belongs in slot 0: take out_cache_loc of the whole graph's batch, or reset the tail of your own buffer at "
    "every replay"
)


def _held_instead(
    observed: Observation,
    got: torch.Tensor,
    want: torch.Tensor,
    owner: torch.Tensor,
    at: tuple[int, int, int],
    *,
    padded: bool,
) -> str:
    """Whose row a wrong slot holds instead. ``got``, ``want`` [L, parts, slots after page 0, ...].

    ``padded``: whether rows of padding may be what stands there.
    """
    if observed.step.stored:
        return "save_kv_cache was False: the pool held the new K and V, and k and v were not to be stored"
    (layer, part, slot), case = at, observed.schedule.case
    row, page = got[layer, part, slot], observed.pool.shape[2] - got.shape[2]
    new = (owner == _OWNER["new"]).nonzero().flatten()
    padding = f"; or a row of padding was stored over it. {_PADDING_GOES}" if padded else ""
    same = (want[:, :, new] == row).flatten(3).all(-1).nonzero().tolist()
    if same:
        places = {(a, b): int(new[c]) for a, b, c in same}
        if (layer, part) in places:
            whose = _owner_text(observed, places[layer, part] + page)
            cause = (
                _shifted(observed, got[layer, part], want[layer, part], new, page)
                or "row order, a stride, or a wrong slot"
            )
            return f"it holds the row of the {whose}: {cause}{padding}"
        other = "the other layer's row" if (layer, 1 - part) not in places else "K where V belongs, or V where K does"
        return f"it holds {other}"
    if owner[slot] == _OWNER["new"] and bool((row == got[layer, part][owner == _OWNER["unowned"]][:1]).all()):
        return f"it was not written, or written with the NaN of a padded row{_where_alone(observed, got, want, new)}"
    if owner[slot] == _OWNER["new"] and _beyond_fp8(observed, row, want[layer, part, slot]):
        return "it holds NaN where a value is beyond the largest FP8 number, and else the right row: a store saturates"
    if owner[slot] == _OWNER["new"] and _neighbours(observed, row, want[layer, part, slot]):
        return (
            "it holds the FP8 numbers next to the right ones: rounding, as of a quotient that is first rounded to 16 "
            "bits, or that is cut off"
        )
    if owner[slot] == _OWNER["new"] and (some := _some_heads(row, want[layer, part, slot])):
        return f"{some}{padding}"
    if owner[slot] == _OWNER["new"] and not row.any() and not padded:
        return "it holds 0 throughout: its row was not stored, or was cleared again"
    if owner[slot] == _OWNER["new"]:
        layout = case.kv_layout
        laid = "" if layout == "nhd" else f"; the KV pool of this case has layout {layout}: take all of its strides"
        fp8 = ", and an FP8 pool holds K / k_scale" if observed.pool.dtype.itemsize == 1 else ""
        return f"it holds no live row of this step: k and v may be strided views of one tensor{fp8}{laid}{padding}"
    if case.kv_layout != "nhd":
        return f"the KV pool of this case has layout {case.kv_layout}: take all of its strides"
    return ""


def _shifted(observed: Observation, got: torch.Tensor, want: torch.Tensor, new: torch.Tensor, page: int) -> str:
    """By how many positions or slots misplaced new rows are off, where that is the same for all that are found.

    ``got``, ``want`` [slots after page 0, Hk, D]; ``new``: slots of this step's tokens among them.
    """
    astray = new[(got[new] != want[new]).flatten(1).any(-1)].tolist()[:_MOST_MOVED]
    moved = []
    for slot in astray:
        lies = (got == want[slot]).flatten(1).all(-1).nonzero().flatten().tolist()
        moved += [(slot + page, at + page) for at in lies[:1] if len(lies) == 1]
    if len(moved) < max(_FEW_MOVED, len(astray) / 2):
        return ""
    places = {slot: (i, at) for i, r in enumerate(observed.step.requests) for at, slot in enumerate(r.slots.tolist())}
    shift = _positions_off(places, moved)
    if shift:
        count, way = abs(shift), "on" if shift > 0 else "back"
        return (
            f"new rows lie {count} position{'s' if count > 1 else ''} too far {way}: a length or a prefix that they "
            "are counted from"
        )
    by_slot = {to - of for of, to in moved}
    if len(by_slot) == 1:
        return f"new rows lie {by_slot.pop():+d} slots off: look at how out_cache_loc is made an address"
    return ""


def _positions_off(places: dict[int, tuple[int, int]], moved: list[tuple[int, int]]) -> int:
    """By how many positions all rows are off that still lie in their request; behind its end a table names any slot.

    ``places``: slot -> request and position. 0: there is no such number.
    """
    slots = {place: slot for slot, place in places.items()}
    shifts = [places[to][1] - places[of][1] for of, to in moved if to in places and places[to][0] == places[of][0]]
    for shift in dict.fromkeys(shifts):
        due = [(slots.get((places[of][0], places[of][1] + shift)), to) for of, to in moved]
        within = [slot == to for slot, to in due if slot is not None]
        if len(within) >= _FEW_MOVED and all(within):
            return shift
    return 0


_MOST_MOVED = 16
"""New rows that are looked for."""
_FEW_MOVED = 2
"""Fewer say nothing of what they have in common."""


def _where_alone(observed: Observation, got: torch.Tensor, want: torch.Tensor, new: torch.Tensor) -> str:
    """Which layers alone have new rows that are wrong, and of a pool that does not lie as usual how it lies."""
    case = observed.schedule.case
    wrong = (got != want)[:, :, new].flatten(1).any(-1).nonzero().flatten().tolist()
    if len(wrong) < len(got):
        names = ", ".join(case.layers.name(layer) for layer in wrong)
        return f", in {names} alone: look at what that has of its own, such as a window, a KV group or other slots"
    if case.kv_layout == "nhd":
        return ""
    return f"; the KV pool of this case has layout {case.kv_layout}: what is reshaped there may be a copy, not a view"


def _some_heads(row: torch.Tensor, want: torch.Tensor) -> str:
    """Which KV heads of a row are wrong, where others are right. ``row``, ``want`` [Hk, D]: bits."""
    right = (row == want).all(-1)
    if not right.any():
        return ""
    wrong = (~right).nonzero().flatten().tolist()
    name = f"KV head{'s' if len(wrong) > 1 else ''} {index_ranges(wrong)} of {len(row)}"
    return (
        f"{name} {'are' if len(wrong) > 1 else 'is'} wrong in it, and the others are right: a store of fewer heads "
        "than there are, or with another stride of them"
    )


_NAN_OF_E4M3, _LARGEST_OF_E4M3 = 0x7F, 0x7E


def _beyond_fp8(observed: Observation, row: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether ``row`` differs from ``want`` only in that NaN stands for the largest number. Bits of an FP8 pool."""
    if observed.pool.dtype is not torch.float8_e4m3fn:
        return False
    off = row != want
    size = row.view(torch.uint8)[off] & 0x7F, want.view(torch.uint8)[off] & 0x7F
    return bool(off.any() and (size[0] == _NAN_OF_E4M3).all() and (size[1] == _LARGEST_OF_E4M3).all())


def _neighbours(observed: Observation, row: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether every number of ``row`` that differs from ``want`` is the next one. Bits of an FP8 pool."""
    if observed.pool.dtype.itemsize > 1:
        return False
    off = row != want
    held, due = row.view(torch.uint8)[off].int(), want.view(torch.uint8)[off].int()
    return bool(off.any() and ((held - due).abs() == 1).all() and ((held ^ due) < _SIGN).all())


_SIGN = 0x80


def _owners(observed: Observation, slots: int) -> torch.Tensor:
    """[slots] int64: 0 unowned, 1 a token of this step, 2 an earlier token of a live request."""
    owner = torch.zeros(slots, dtype=torch.int64)
    for request in observed.step.requests:
        owner[torch.from_numpy(request.slots[: request.prefix])] = 2
        owner[torch.from_numpy(request.copies).flatten()] = 2
        owner[torch.from_numpy(request.slots[request.prefix :])] = 1
    return owner


def _owner_text(observed: Observation, slot: int) -> str:
    for i, request in enumerate(observed.step.requests):
        found = (request.slots == slot).nonzero()[0]
        if len(found):
            position = int(found[0])
            kind = "new" if position >= request.prefix else "earlier"
            return f"{kind} token at position {position} of request {i}"
    return "owned by no live request"


_WORK_ON_A_COPY = "work on a copy, or in a buffer of your own; the caller goes on using these tensors"
_BESIDE_OUT = (
    "out is a part of a larger tensor, whose other rows are somebody else's: write its own rows alone, with a mask for "
    "the rest of a tile"
)


def inputs_unchanged(observed: Observation) -> list[Finding]:
    """Every input that belongs to the kit holds what it held."""
    if not observed.modified:
        return []
    return [
        Finding(
            "inputs-unchanged",
            f"{observed.modified[0]} was modified",
            where=", ".join(observed.modified),
            hint=_BESIDE_OUT if observed.modified[0].startswith("memory b") else _WORK_ON_A_COPY,
            step=observed.label,
        )
    ]


CHECKS = (
    Check(
        "reads-own-kv",
        "A result depends on the request's own KV tokens alone: every other slot holds NaN, page tails and page 0 "
        "included.",
        "A load that is masked after the multiply (0 * NaN), a length rounded up to a page, page 0 read for padding.",
        "flash-attention #1745; sglang #32477; aiter #4245",
        "With zeros in unowned slots the result is finite. `attended` says where the foreign weight came from; if the "
        "KV tokens are right, something is multiplied by 0 instead of masked.",
        judged_from=Stage.OBSERVED,
        behind_outputs=True,
    ),
    Check(
        "writes-own-kv",
        "Exactly the batch's slots (and page 0) change, nothing beside slots does, and they hold the batch's K and V.",
        "A slot of -1 for padding, slots frozen at capture, K and V swapped, a scale that is missing or applied twice.",
        "vLLM #43810; TensorRT-LLM #17110; sglang #24243",
        "`where` names the slot, its page, and whose it is. An unowned slot: padding. An earlier token: an offset. "
        "This step's: frozen slots, the wrong numbers, or padding that was stored over them.",
        judged_from=Stage.OBSERVED,
        run=lambda judgement, schedule, claims: writes_own_kv(judgement.observed, schedule.case),
    ),
    Check(
        "inputs-unchanged",
        "q, k, v, the batch's tensors and the request table are not modified, nor is memory beside a lent out.",
        "In-place scaling or rotation of q, advancing seq_lens in place, a padded batch or a whole tile written back.",
        "sglang #23037",
        "`where` lists the tensors that no longer hold what they held.",
        judged_from=Stage.OBSERVED,
        run=lambda judgement, *_: inputs_unchanged(judgement.observed),
    ),
)
"""In the order in which they are worth reading."""
