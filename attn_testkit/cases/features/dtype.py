"""The dtype of q, k, v and of the output."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...contract import DTYPES, BackendContext, Capabilities
from ...glossary import Entry
from .feature import Asked, Columns, Feature, Without, listed_word, of_fields
from .outside import pool_like

_TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    name = next((n for n in ("fp32", "bf16", "fp16") if n not in declared.precision.dtypes), None)
    if name is None or context.kv_pool.dtype != context.dtype:
        return None
    pool = pool_like(context, dtype=_TORCH[name])
    return (f"dtype {name}", replace(context, dtype=_TORCH[name], kv_pool=pool)) if pool else None


DTYPE = Feature(
    name="dtype",
    order=50,
    fields=("dtype",),
    words=(listed_word(DTYPES, "dtype"),),
    explained=(
        Entry(
            "fp16",
            "q, k, v and output are float16.",
            also=("float16", "half"),
        ),
        Entry("bf16", "q, k, v and output are bfloat16.", also=("bfloat16",)),
        Entry("fp32", "q, k, v and output are float32.", also=("float32",)),
    ),
    describe=lambda case: {"dtype": case.dtype},
    declared=(
        Asked(lambda case: f"dtype {case.dtype}", lambda declared, case: case.dtype in declared.precision.dtypes),
    ),
    values=Columns(lambda declared, mode, tier: {"dtype": sorted(declared.precision.dtypes)}),
    covered=Without("The feature KV dtype counts each pair of the two dtypes."),
    simpler=of_fields("dtype"),
    undeclared=(_undeclared,),
    random=lambda draws, declared, so_far: {"dtype": draws.one_of(sorted(declared.precision.dtypes))},
    varies="instance",
    apply=Without("steps/data.py rounds the numbers to the dtype, and the harness makes pool and batches of it."),
)
