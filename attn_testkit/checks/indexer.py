"""Checks of an indexer: index keys that it stores, and the keys that it selects."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..cases.case import Case
from ..cases.features.kv_splits import has_own_pools, splits_of
from ..contract import Capabilities, Execution
from ..contract.index_pool import INDEX_PAGE, INDEX_WIDTH, index_scales, keys_of, scales_of
from ..contract.index_rope import rotated_index
from ..contract.sparse import INDEX_SUMS
from ..results.finding import Finding
from ..steps.data import StepData
from ..steps.index_data import index_layers, index_memory, make_index_data, scale_of
from ..steps.index_rope import OTHER_STYLE, before_rotation, turns_of
from ..steps.kv_groups import slot_in_pool
from .comparison import Comparison
from .describe import number
from .evaluation import Evaluation
from .observation import Observation
from .selection_hints import Selected, consistent, hint_of

_KEY_BYTES = INDEX_PAGE * INDEX_WIDTH
_NEAR = 2.0**-20
_SLACK = 1 + 2.0**-10
"""Allowed error of a quotient, which is rounded before it is rounded to FP8."""


def has_indexer(declared: Capabilities, execution: Execution) -> bool:
    """True for backends with an indexer."""
    return declared.sparse is not None and declared.sparse.indexer is not None


def shown(case: Case) -> bool:
    """True for cases with an indexer."""
    return case.indexer is not None


def selections_shown(case: Case) -> bool:
    """True for cases in which the kit sees the selection."""
    return case.indexer is not None and not case.indexer.fused


@lru_cache(maxsize=1)  # large; three checks of a step ask
def _memory(observed: Observation) -> tuple[torch.Tensor, torch.Tensor]:
    """The index pool before and after a step, [layers with index keys, pages, 64 * 132] uint8; those of rank 0 come
    before those of rank 1, and so on."""
    case = observed.schedule.case
    ranks = len(splits_of(case)) if has_own_pools(case) else 1
    before = index_memory(observed.schedule, observed.step, after=observed.step.stored).repeat(ranks, 1, 1)
    after, pieces = before.clone(), observed.copies.group("index")
    after.view(-1)[pieces["at"]] = pieces["now"]
    return before, after


def index_stored(comparison: Comparison, case: Case) -> list[Finding]:
    """Check that the pool holds the step's index keys, and that no other byte after page 0 of the KV pool changed."""
    observed = comparison.observed
    if case.indexer is None or not observed.copies.group("index"):
        return []
    before, after = _memory(observed)
    data, index = comparison.expected.data, make_index_data(observed.schedule, observed.step)
    rows = index.stored(data)[: 0 if observed.step.stored else None]
    slots = data.out_cache_loc[rows]
    for place, layer in enumerate(_layers_of(case, len(after))):
        keys, scales = keys_of(after[place]).flatten(0, 1), scales_of(after[place]).flatten()
        given = index.k[layer, rows].float()
        want = index_scales(given, scale_of(case))
        got, held = scales[slots], keys[slots].float().double()
        # NaN is not within any limit.
        if case.indexer.pow2:
            # A logarithm in float32 does not tell a power of two from those next to it.
            low, high = (index_scales(given * (1 + each), scale_of(case)) for each in (-_NEAR, _NEAR))
            right_scale = (got == low) | (got == high)
        else:
            right_scale = ((got.view(torch.int32) - want.view(torch.int32)).abs() <= 1) & got.isfinite()
        exact = given.double() / got.double()[:, None]
        exponent = exact.abs().clamp(min=2.0**-6).log2().floor()
        right = ((held - exact).abs() <= _SLACK * (exponent - 4).exp2()).all(-1)
        wrong = ~(right & right_scale)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            which = "key" if bool(right_scale[at]) else "scale"
            dim = int((held[at] - exact[at]).abs().nan_to_num(torch.inf).argmax())
            value = (
                f"number {dim} is {number(float(held[at, dim]))}, want {number(float(exact[at, dim]))} in units of "
                "the scale"
                if which == "key"
                else f"the scale is {float(got[at]):.9g}, want {float(want[at]):.9g}"
            )
            return [
                Finding(
                    "index-stored",
                    f"the index pool does not hold the {which} of a token of this step",
                    where=f"{_rank(case, place)}{_token(comparison, layer, int(rows[at]))}, "
                    f"{_slot(comparison, int(slots[at]))}: {value}",
                    spread=f"tokens that are wrong: {int(wrong.sum())} of {len(slots)}",
                    hint=_of_other_ranks(case, data, place, wrong)
                    or _of_storage(comparison, after, place, layer, rows),
                    step=observed.label,
                )
            ]
    return _elsewhere(comparison, before, after, slots)


def _elsewhere(comparison: Comparison, before: torch.Tensor, after: torch.Tensor, slots: torch.Tensor) -> list[Finding]:
    """Report bytes of the index pool that changed and belong to no token of the step."""
    observed, case = comparison.observed, comparison.observed.schedule.case
    owner = torch.ones(after.shape[1] * INDEX_PAGE, dtype=torch.bool)
    # Padding may go to page 0 of the KV pool.
    owner[: case.page_size] = False
    owner[slots] = False
    changed = after != before
    keys = changed[:, :, :_KEY_BYTES].reshape(len(changed), -1, INDEX_WIDTH).any(-1)
    scales = changed[:, :, _KEY_BYTES:].reshape(len(changed), -1, 4).any(-1)
    wrong = (keys | scales) & owner
    if not wrong.any():
        return []
    place, slot = (int(each) for each in wrong.nonzero()[0])
    which = "key" if bool(keys[place, slot]) else "scale"
    whose = next(
        (
            f"token {request.slots.tolist().index(slot)} of request {number_}"
            for number_, request in enumerate(observed.step.requests)
            if slot in request.slots
        ),
        "no live request",
    )
    layer = _layers_of(case, len(after))[place]
    return [
        Finding(
            "index-stored",
            f"the index pool is wrong after the step: the {which} of another token was overwritten",
            where=f"{_rank(case, place)}{case.layers.name(layer)}, {_slot(comparison, slot)}, of {whose}",
            spread=f"slots that are wrong: {int(wrong.sum())}",
            hint="store only the rows of live requests, and padded rows in the slot of out_cache_loc",
            step=observed.label,
        )
    ]


def _layers_of(case: Case, places: int) -> list[int]:
    """Layer of each of ``places`` layers of the pool, which has the layers with index keys once for each rank."""
    own = index_layers(case)
    return [*own] * (places // len(own))


def _rank(case: Case, place: int) -> str:
    """Name of the rank of a layer of the pool, followed by a comma; empty without ranks."""
    return f"{splits_of(case)[place // len(index_layers(case))]}, " if has_own_pools(case) else ""


def _slot(comparison: Comparison, slot: int) -> str:
    """Name of a slot of the schedule, by its number in the pool."""
    case, schedule = comparison.observed.schedule.case, comparison.observed.schedule
    # The last page of 64 index keys may end after the pool of K and V, which has no such slot.
    if slot < (schedule.num_pages + 1) * case.page_size:
        slot = slot_in_pool(schedule, 0, slot)
    return f"slot {slot} (page {slot // INDEX_PAGE}, token {slot % INDEX_PAGE})"


def _token(comparison: Comparison, layer: int, row: int) -> str:
    """Name of a row in a layer."""
    data, case = comparison.expected.data, comparison.observed.schedule.case
    return (
        f"{case.layers.name(layer)}, request {int(data.row_request[row])}, row {int(data.row_offset[row])}, token at "
        f"position {int(data.positions[row])}"
    )


def _of_other_ranks(case: Case, data: StepData, place: int, wrong: torch.Tensor) -> str:
    """Hint for a rank without the index keys of tokens ``wrong`` [T] bool, if these are the tokens of other ranks."""
    if not has_own_pools(case):
        return ""
    rank = splits_of(case)[place // len(index_layers(case))]
    others = ~rank.holds(data.row_key, torch.zeros_like(data.row_key))
    if not torch.equal(wrong, others):
        return ""
    return f"these are the tokens of other ranks: {rank} stores the index keys of all tokens, in batch.index_cache_loc"


def _of_storage(comparison: Comparison, after: torch.Tensor, place: int, layer: int, rows: torch.Tensor) -> str:
    """Hint for index keys of ``rows`` [n] that are stored elsewhere."""
    case = comparison.observed.schedule.case
    assert case.indexer is not None
    index = make_index_data(comparison.observed.schedule, comparison.observed.step)
    slots, given = comparison.expected.data.out_cache_loc[rows], index.k[layer, rows].float()
    scale = index_scales(given, scale_of(case))
    want = (given / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    # As rows of 132 bytes, a key and its scale.
    tokens = after[place].view(-1, INDEX_WIDTH + 4)[slots]
    if torch.equal(tokens[:, :INDEX_WIDTH], want):
        return "the page is written token by token, 128 bytes and a scale each: a page has 64 keys, then 64 scales"
    held = keys_of(after[place]).flatten(0, 1)[slots].view(torch.uint8)
    if text := _of_rotation(case, given, comparison.expected.data.positions[rows], held):
        return text
    got = scales_of(after[place]).flatten()[slots]
    for other, of_other in enumerate(index_layers(case)):
        there = scales_of(after[other]).flatten()[slots]
        if other != place and torch.equal(there, scale) and not torch.equal(got, scale):
            return f"the scales are in the pool of {case.layers.name(of_other)}: layers share a view of scales"
    for of_other in index_layers(case):
        if of_other != layer and torch.equal(got, index_scales(index.k[of_other, rows].float(), scale_of(case))):
            return f"it holds the scales of {case.layers.name(of_other)}: layers share a view of scales"
    dialect = index_scales(given, "amax" if case.indexer.pow2 else "power_of_two")
    if torch.equal(got, dialect) and not torch.equal(dialect, scale):
        said = "amax / 448, but powers of two are declared" if case.indexer.pow2 else "powers of two"
        return f"the scales are {said}: see Indexer.scale"
    return ""


def _of_rotation(case: Case, given: torch.Tensor, positions: torch.Tensor, held: torch.Tensor) -> str:
    """Hint for stored keys ``held`` [n, 128] uint8 that were not rotated to ``given`` [n, 128], or in another style."""
    style = case.indexer.rotates if case.indexer else "none"
    if style not in OTHER_STYLE:
        return ""
    turns = turns_of(positions)
    before = before_rotation(given, turns, style)
    other = rotated_index(before, turns, OTHER_STYLE[style])
    for rows, text in (
        (before, "the keys are stored as they are given: they are not rotated"),
        (other, f"the keys are rotated in the style {OTHER_STYLE[style]}: other numbers are pairs in {style}"),
    ):
        want = (rows / index_scales(rows, scale_of(case))[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        if torch.equal(held, want) and not torch.equal(rows, given):
            return text
    return ""


@lru_cache(maxsize=1)
def _selected(comparison: Comparison) -> Selected | None:
    observed = comparison.observed
    group = observed.copies.group("selected")
    if not group:
        return None
    _, after = _memory(observed)
    return Selected.of(observed, comparison.expected.data, group, after)


def selection_well_formed(comparison: Comparison, case: Case) -> list[Finding]:
    """Check that each row selects min(topk, keys that it may see) different keys, and holds -1 in the other columns."""
    selected = _selected(comparison)
    if selected is None or case.selection is None:
        return []
    for layer, places in selected.places.items():
        for row, listed in enumerate(places.tolist()):
            seen = int(selected.seen[row])
            wrong = _malformed(listed, seen, case.selection.topk, selected.raw[layer][row].tolist())
            if wrong:
                return [
                    Finding(
                        "selection-well-formed",
                        f"a selection is not well-formed: {wrong[1]}",
                        where=f"selected[{_token(comparison, layer, row)}], column {wrong[0]}",
                        hint=hint_of(selected, layer, malformed=True),
                        step=comparison.observed.label,
                    )
                ]
    return []


def _malformed(listed: list[int], seen: int, topk: int, raw: list[int]) -> tuple[int, str] | None:
    """Column and text of the first mistake in a row; None if there is none."""
    met: dict[int, int] = {}
    for column, place in enumerate(listed):
        if place == -1:
            continue
        if raw[column] < -1:
            return column, f"it holds index {raw[column]}, but only -1 may stand for no key"
        if place < 0:
            return column, f"index {raw[column]} does not name a key of the request"
        if place >= seen:
            return column, f"it selects key {place}, but the row may see only {seen} keys"
        if place in met:
            return column, f"key {place} is selected twice, in columns {met[place]} and {column}"
        met[place] = column
    want = min(topk, seen)
    if len(met) != want:
        return len(met), f"{len(met)} keys are selected, but {want} of the {seen} visible keys must be"
    return None


def selects_best(comparison: Comparison, case: Case, declared: Capabilities) -> list[Finding]:
    """Check that no key that is left out has a higher score than one that is selected, apart from rounding."""
    selected = _selected(comparison)
    if selected is None or case.indexer is None:
        return []
    indexer = declared.sparse.indexer if declared.sparse else None
    unit = INDEX_SUMS[indexer.sums] if indexer and case.indexer.data == "gauss" else 0.0
    for layer in selected.places:
        wrong = [
            (each, pair)
            for each in selected.scores(layer, unit=unit)
            if (pair := consistent(each, selected.mask(layer, each)))
        ]
        if wrong:
            each, (taken, left) = wrong[0]
            return [
                Finding(
                    "selects-best",
                    f"the indexer selects key {taken} of score {float(each.scores[taken]):.6g}, and not key {left} of "
                    f"score {float(each.scores[left]):.6g}",
                    where=f"selected[{_token(comparison, layer, each.row)}]; the row may see {len(each.scores)} keys",
                    spread=f"rows of {case.layers.name(layer)} that are wrong: {len(wrong)} of {len(selected.seen)}",
                    hint=hint_of(selected, layer),
                    step=comparison.observed.label,
                )
            ]
    return []


EVALUATIONS = (
    Evaluation(
        "index-stored",
        applies=has_indexer,
        shown_by=shown,
        run=lambda comparison, schedule, declared: index_stored(comparison, schedule.case),
    ),
    Evaluation(
        "selection-well-formed",
        applies=has_indexer,
        shown_by=selections_shown,
        run=lambda comparison, schedule, declared: selection_well_formed(comparison, schedule.case),
    ),
    Evaluation(
        "selects-best",
        applies=has_indexer,
        shown_by=selections_shown,
        run=lambda comparison, schedule, declared: selects_best(comparison, schedule.case, declared),
    ),
)
