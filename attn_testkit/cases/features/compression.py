"""Layers that compress keys: how many tokens a group has, and whether groups overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...contract import BackendContext, Capabilities, ForwardMode
from ...contract.compressor_layer import COMPRESSED_ROPE
from ...contract.row_format import ROPE_IN_VALUE, ROW_FORMATS
from ...glossary import Entry
from ..compression import Compression
from ..fields import Changes, Fields
from ..plan import Plan
from .feature import Asked, Bound, Columns, Covered, Feature, OnSteps, Row, Trait, Word, of_fields
from .outside import first_undeclared

ROWS = ("same", *sorted(ROPE_IN_VALUE))
"""Compressed rows in memory, the simplest first."""
_WORDS = {rows.replace("_", ""): rows for rows in ROWS[1:]}


def declared_compressions(declared: Capabilities) -> list[Compression]:
    """Declared groups, the smallest first."""
    each = declared.compressor
    if each is None:
        return []
    kinds = [(ratio, False) for ratio in each.ratios] + [(ratio, True) for ratio in each.overlapping_ratios]
    return [Compression(*kind, rows) for rows in ROWS if rows in each.rows for kind in sorted(kinds)]


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    found = declared_compressions(declared)
    return {"compression": found} if found else {}


_PLACES = (-1, 0, 1, -2)
"""Tokens that a request has more than whole groups: one group is complete with the first new row, and so on."""


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    compression = row.get("compression")
    if compression is None:
        return {}
    prefixes = [
        max(1, -(-length // compression.ratio)) * compression.ratio + _PLACES[place % len(_PLACES)]
        if length
        else length
        for place, length in enumerate(so_far["prefixes"])
    ]
    return {"prefixes": tuple(prefixes)}


def _plans(case: Fields, plans: list[Plan]) -> list[Plan]:
    """Shorten every second long request of the steps after the first, so that its first new row completes a group."""
    if case.compression is None:
        return plans
    ratio = case.compression.ratio

    def moved(plan: Plan) -> Plan:
        lens = (
            length // ratio * ratio - 1 if length >= ratio and place % 2 == 0 else length
            for place, length in enumerate(plan.prefixes)
        )
        return replace(plan, prefixes=tuple(lens))

    # A chunk continues the step before it, and a rotated step has its lengths.
    own, *others = plans
    return [own, *(each if each.follows or each.rotated is not None else moved(each) for each in others)]


def _fit(declared: Capabilities, case: Fields) -> Changes:
    if not case.heads.layout.compresses:
        return {"compression": None}
    found = declared_compressions(declared)
    return {} if not found or case.compression in found else {"compression": found[0]}


def _wrong(case: Fields) -> str:
    compression = case.compression
    if case.heads.layout.compresses != (compression is not None):
        return f"heads {case.heads} and {compression or 'no ratio'}: layers of {case.heads.family} " + (
            "compress keys; add a ratio, such as ratio4overlap" if compression is None else "compress nothing"
        )
    if compression is None:
        return ""
    if case.heads.q_heads != 1:
        return f"heads {case.heads}: a compressor has one head; write compressor1"
    if case.page_size % compression.ratio:
        return f"{compression} and pages of {case.page_size}: a page holds whole groups"
    if case.head_dim < COMPRESSED_ROPE:
        return f"{compression} and rows of {case.head_dim}: {COMPRESSED_ROPE} numbers of a row are rotated"
    form = ROW_FORMATS.get(compression.rows)
    if form and not form.fits(case.heads.layout, case.dtype, case.head_dim):
        return f"{compression} and rows of {case.head_dim} in {case.dtype}: such rows are of {form.needs}"
    return ""


def _phrase(case: Fields) -> str:
    if case.compression is None:
        return ""
    overlap = ", and of the group before it" if case.compression.overlaps else ""
    packed = "" if case.compression.rows == ROWS[0] else f", in {case.compression.rows}"
    return f"a row of each {case.compression.ratio} tokens{overlap}{packed}"


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if context.compressor is None or declared.compressor is None:
        return None
    ratios = declared.compressor.ratios | declared.compressor.overlapping_ratios
    other = first_undeclared((2, 8, 16, 32), ratios)
    if other is None:
        return None
    layers = tuple(replace(layer, compress_ratio=other) for layer in context.compressor.layers)
    return f"groups of {other} tokens", replace(context, compressor=replace(context.compressor, layers=layers))


COMPRESSION = Feature(
    name="compression",
    order=275,
    fields=("compression",),
    traits=(
        Trait(
            "layers that compress keys",
            lambda case: case.compression is not None,
            excludes={
                "rows of a draft model": "a draft model has no compressor",
                "bigpool": "states in float32 of so many slots need 34 GB",
                "loop": "tokens that complete no group have no output from which a text could go on",
                "branching trees": "groups are of consecutive positions, of which a tree has several tokens",
            },
        ),
    ),
    wrong=_wrong,
    words=(
        Word(
            rf"ratio(\d+)(overlap)?(?:\.({'|'.join(_WORDS)}))?",
            lambda match, so_far: {
                "compression": Compression(int(match[1]), match[2] is not None, _WORDS.get(match[3], ROWS[0]))
            },
            lambda case: str(case.compression or ""),
            bounds=(Bound("tokens of a group", 2, 1024),),
        ),
    ),
    explained=(
        Entry(
            "ratio4overlap",
            "Layers make one row of each group of 4 tokens and the group before it; without `overlap` only of "
            "the group. `.fp8dsmlav4`: rows in memory are packed.",
            also=("compression ratio", "compress_ratio"),
            page="how-to/compressors.md",
            numbers=True,
        ),
    ),
    describe=lambda case: {"compression": _phrase(case)},
    declared=(
        Asked(
            lambda case: f"compression {case.compression}" if case.compression else "layers with keys or states",
            lambda declared, case: (
                declared.compressor is None
                if case.compression is None
                else case.compression in declared_compressions(declared)
            ),
        ),
    ),
    fit=_fit,
    values=Columns(_columns, _of_row),
    covered=(
        Covered(
            "compression",
            "compression",
            lambda declared, mode: map(str, declared_compressions(declared)),
            lambda declared, case: str(case.compression) if case.compression else None,
            lambda declared, case, value: {
                "compression": next(each for each in declared_compressions(declared) if str(each) == value)
            },
        ),
    ),
    simpler=of_fields("compression"),
    undeclared=(_undeclared,),
    random=lambda draws, declared, so_far: (
        {"compression": draws.one_of(found)} if (found := declared_compressions(declared)) else {}
    ),
    varies="instance",
    apply=(OnSteps(_plans),),
)
