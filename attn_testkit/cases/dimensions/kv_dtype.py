"""The dtype of the KV pool."""

from __future__ import annotations

from collections.abc import Sequence

from ...contract import KV_DTYPES, ROW_FORMATS
from ..fields import Changes, Fields
from ..layers import SETTINGS
from .dimension import Asked, Columns, Covered, Dimension, Kept, OnLayers, Without, Word, of_fields

__all__ = ["KV_DTYPE"]


def _layers(case: Fields) -> Sequence[Changes]:
    own = SETTINGS[: case.layers.count]
    if case.kv_dtype == "same" or case.kv_dtype in ROW_FORMATS:
        return [{} for _ in own]
    return [
        {"k_scale": each.k_scale, "v_scale": each.k_scale if case.heads.layout.values_in_keys else each.v_scale}
        for each in own
    ]


def _word(kv_dtype: str) -> str:
    return "kv" + kv_dtype.replace("_", "")


_WORDS = {_word(kv_dtype): kv_dtype for kv_dtype in KV_DTYPES if kv_dtype != "same"}

KV_DTYPE = Dimension(
    name="KV dtype",
    fields=("kv_dtype",),
    words=(
        Word(
            "|".join(_WORDS),
            lambda match, so_far: {"kv_dtype": _WORDS[match[0]]},
            lambda case: "" if case.kv_dtype == "same" else _word(case.kv_dtype),
        ),
    ),
    describe=lambda case: {"kv_dtype": "" if case.kv_dtype == "same" else case.kv_dtype},
    declared=(
        Asked(lambda case: f"KV dtype {case.kv_dtype}", lambda declared, case: case.kv_dtype in declared.kv_dtypes),
    ),
    fit=Without("Cases are made of declared dtypes."),
    values=Columns(
        lambda declared, mode, tier: {"kv_dtype": sorted(declared.kv_dtypes, reverse=True)}, order={"kv_dtype": 3}
    ),
    combined=Kept(("kv_dtype",)),
    covered=(
        Covered(
            "dtypes",
            "dtype and KV dtype",
            lambda declared, mode: ((dtype, kv_dtype) for dtype in declared.dtypes for kv_dtype in declared.kv_dtypes),
            lambda declared, case: (case.dtype, case.kv_dtype),
            lambda declared, case, pair: {"dtype": pair[0], "kv_dtype": pair[1]},
        ),
    ),
    simpler=of_fields("kv_dtype"),
    undeclared=Without("No context asks for a pool of an undeclared dtype so far, but with the model's."),
    random=lambda draws, declared, so_far: {"kv_dtype": draws.one_of(sorted(declared.kv_dtypes, reverse=True))},
    varies="instance",
    apply=(OnLayers(_layers),),
)
