"""Class C: a forward's own k and v: attended to, stored already, or those of padded rows."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .builds import RegisterRowsBackend
from .catalogue import fault
from .dense import DenseBackend
from .parent import PlannedBackend

_ALL = tuple(ForwardMode)
FP8 = PlannedBackend.capabilities.with_changes(
    kv_pool={"kv_dtypes": {"fp8_e4m3"}},
    precision={"dtypes": {"bf16"}},
    heads={"families": {"gqa"}, "head_dims": {64}},
    options={"logit_cap": False, "sinks": False},
)
"""Capabilities with an FP8 pool, and few values in fields that do not matter here."""


@fault("general; extend kernels of sglang, prefix prefill of vLLM", "matches-oracle", "new_rows_as_given")
class AttendsNewRowsAsGiven(RegisterRowsBackend):
    """New rows are attended to in the model's dtype, stored in FP8, and declared as attended to from the FP8 pool. The
    same tokens give different results once they are part of the prefix.
    """

    capabilities = FP8


@fault("general", "matches-oracle", "new_rows_as_given")
class DeclaresNewRowsAsGiven(PlannedBackend):
    """New rows are declared as attended to unquantized, but the kernel reads them from the FP8 pool."""

    capabilities = FP8.with_changes(precision={"new_rows_as_given": _ALL})


@fault("general", "completes", "takes_none_kv", executions="eager")
class ReshapesKBeforeItAsks(PlannedBackend):
    """k is reshaped before save_kv_cache is tested, although it is None if the pool holds the rows already."""

    capabilities = PlannedBackend.capabilities.with_changes(server={"takes_none_kv": True})

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        k = k.reshape(-1, layer.tp_k_head_num, layer.head_dim)
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@fault("general; PAD_SLOT_ID of vLLM", "writes-own-kv reads-own-kv padding-inert", executions="graph")
class SlotMinusOneIsTheLastSlot(DenseBackend):
    """Rows of padding have slot -1, which plain indexing reads as the last slot of the pool."""

    capabilities = DenseBackend.capabilities.with_changes(
        server={"padding_slots": {-1}}, heads={"families": {"gqa"}}, precision={"dtypes": {"bf16"}}
    )
