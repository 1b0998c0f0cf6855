"""Checks of memory that the kit owns: whose slots were read and written, which inputs were modified."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..cases.case import Case
from ..cases.kv_groups import slot_in_pool
from ..results import Finding
from .check import Check, Stage
from .judgement import BITS
from .misplaced import NEW, OLD, PADDING_GOES, UNOWNED, held_instead, owner_text, owners
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
    if not torch.equal(slots, want_slots):
        return False
    limit = observed.inputs.new_limit
    if limit is None:
        return torch.equal(_raw(rows), _raw(want_rows))
    return not bool(beyond(rows.view(want_rows.dtype), want_rows, limit).any())


def beyond(got: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Bool, of one shape with all three: elements of ``got`` that are not within ``limit`` of ``want``; NaN is not."""
    return ~((got.double() - want.double()).abs() <= limit)


def writes_own_kv(observed: Observation, case: Case, *, takes_strided_heads: bool = False) -> list[Finding]:
    """The pool outside page 0 is bit for bit what it should be. ``takes_strided_heads``: is claimed."""
    page = case.page_size
    if pool_is_right(observed, page):
        return []
    pool_after = observed.pool_after
    got, want = _raw(observed.pool)[:, :, page:], _raw(pool_after)[:, :, page:]
    differs = (got != want).flatten(3).any(-1)
    inputs = observed.inputs
    if inputs is not None and inputs.new_limit is not None:
        # What is computed is compared within its limit, and all else that was written in bits.
        computed = observed.pool[:, :, inputs.new_slots]
        wrong_rows = beyond(computed, inputs.new_rows, inputs.new_limit).flatten(3).any(-1)
        differs[:, :, inputs.new_slots - page] = wrong_rows
    if observed.outside and not differs.any():
        return [_outside(observed)]
    owner = owners(observed, pool_after.shape[2])[page:]
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
    strided = takes_strided_heads and case.strided_heads
    hint = hint or held_instead(
        observed, got, want, owner, (layer, part, slot), padded=0 < kinds["new"] <= behind, strided_heads=strided
    )
    name, of_layer = "latent" if pool_after.shape[1] == 1 else "KV"[part], case.layers.name(layer)
    return [
        Finding(
            "writes-own-kv",
            f"KV memory is wrong after the step: {what[first]}",
            where=f"{of_layer}, {name}, slot {shown} (page {shown // page}, offset {shown % page}): "
            f"{owner_text(observed, slot + page)}",
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


_OWNER = {"new": NEW, "old": OLD, "unowned": UNOWNED}
_KIND = {"new": "of this step's tokens", "old": "of earlier tokens", "unowned": "unowned"}


def _of_padding(kinds: Mapping[str, int], behind: int) -> str:
    """Where all live rows are stored, other slots were written, and ``behind`` rows of padding are enough for them."""
    more = kinds["unowned"] + kinds["old"]
    if kinds["new"] or not 0 < more <= behind:
        return ""
    return (
        f"the new tokens lie where they should; slots written beside them: {more}; rows of padding: "
        f"{behind}. {PADDING_GOES}"
    )


def _rows_behind(observed: Observation, case: Case) -> int:
    """Rows of padding in the graph; 0 in an eager run."""
    return observed.step.bucket * case.width - observed.step.tokens if observed.replay else 0


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
        run=lambda judgement, schedule, claims: writes_own_kv(
            judgement.observed, schedule.case, takes_strided_heads=claims.server.takes_strided_heads
        ),
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
