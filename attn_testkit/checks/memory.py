"""Checks of memory that the kit owns: slots that were read and written, inputs that were modified."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..cases.case import Case
from ..cases.features.kv_splits import has_own_pools
from ..families.table import families_of
from ..results.finding import Finding
from ..steps.kv_groups import slot_in_pool
from .comparison import BITS, beyond
from .compressor_writes import writes_compressed
from .evaluation import Evaluation
from .hybrid import writes_own_keys
from .misplaced import NEW, OLD, PADDING_GOES, UNOWNED, held_instead, owner_text, owners
from .observation import Observation
from .rank_writes import strays_of, writes_on_ranks
from .replica_writes import different_of, writes_on_replicas


def _raw(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(BITS[pool.dtype.itemsize])


def pool_is_right(observed: Observation, page_size: int) -> bool:
    """True if the slots after page 0 that changed are those of the batch, and hold its K and V bit for bit.

    Padding may write into page 0. ``page_size`` in slots. A slot held NaN before, which never equals its new value.
    """
    assert observed.inputs is not None
    if observed.outside or len(strays_of(observed)) or len(different_of(observed)):
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


def writes_own_kv(observed: Observation, case: Case, *, takes_strided_heads: bool = False) -> list[Finding]:
    """Check that the pool outside page 0 is right bit for bit. ``takes_strided_heads``: the capability."""
    if case.layers.hybrid:
        return writes_own_keys(observed, case)
    page = case.page_size
    if pool_is_right(observed, page):
        return []
    if has_own_pools(case):
        return writes_on_ranks(observed)
    if case.compression:
        return writes_compressed(observed, case)
    if case.row_ranks:
        return writes_on_replicas(observed) or [_outside(observed)]
    pool_after = observed.pool_after
    got, want = _raw(observed.pool)[:, :, page:], _raw(pool_after)[:, :, page:]
    differs = (got != want).flatten(3).any(-1)
    inputs = observed.inputs
    if inputs is not None and inputs.new_limit is not None:
        # Computed values are compared within their limit, and everything else that was written in bits.
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
    """Report memory between slots that changed, although every slot is right."""
    return Finding(
        "writes-own-kv",
        "KV memory is wrong after the step: memory between slots of the pool was written",
        where=f"byte {observed.outside[0]} of the memory of a KV pool of layout "
        f"{observed.schedule.case.kv_layout} lies in",
        hint="use the strides of the pool to store a row, and store no more than the row: the memory after it may be "
        "padding",
        step=observed.label,
    )


_OWNER = {"new": NEW, "old": OLD, "unowned": UNOWNED}
_KIND = {"new": "of this step's tokens", "old": "of earlier tokens", "unowned": "unowned"}


def _of_padding(kinds: Mapping[str, int], behind: int) -> str:
    """Hint for other slots that were written, if all live rows are stored and the ``behind`` padded rows explain
    them."""
    more = kinds["unowned"] + kinds["old"]
    if kinds["new"] or not 0 < more <= behind:
        return ""
    return (
        f"the new tokens are in the right slots, but other slots were written too ({more}), probably by padded rows "
        f"({behind}). {PADDING_GOES}"
    )


def _rows_behind(observed: Observation, case: Case) -> int:
    """Number of padded rows in the graph; 0 in an eager run."""
    return observed.step.bucket * case.width - observed.step.tokens if observed.replay else 0


_WORK_ON_A_COPY = "work on a copy or in your own buffer; the caller still uses these tensors"
_BESIDE_OUT = (
    "out is part of a larger tensor whose other rows belong to others: write only the rows of out, and mask the rest "
    "of a tile"
)


def inputs_unchanged(observed: Observation) -> list[Finding]:
    """Check that no input that belongs to the kit was modified."""
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


def _has_keys(case: Case) -> bool:
    return any(family.reads == "reads-own-kv" for family in families_of(case))


EVALUATIONS = (
    Evaluation(
        "reads-own-kv",
        shown_by=_has_keys,
    ),
    Evaluation(
        "writes-own-kv",
        shown_by=_has_keys,
        run=lambda comparison, schedule, declared: writes_own_kv(
            comparison.observed, schedule.case, takes_strided_heads=declared.server.takes_strided_heads
        ),
    ),
    Evaluation(
        "inputs-unchanged",
        run=lambda comparison, *_: inputs_unchanged(comparison.observed),
    ),
)
