"""Mistakes in prefill of two parts, each put into a copy of our adapter of FlashInfer's ragged and paged wrappers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from attn_testkit.backends.flashinfer import FlashInferBackend, LayerKind
from attn_testkit.backends.flashinfer_plan import PagePlan
from attn_testkit.backends.flashinfer_ragged import FlashInferRaggedBackend
from attn_testkit.contract import AttentionLayer, ForwardBatch


class PrefixOfTheFirstAlone(FlashInferRaggedBackend):
    """Takes a batch for one without prefixes when its first request has none."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        assert batch.extend_prefix_lens_cpu is not None
        if not batch.extend_prefix_lens_cpu[0]:
            self._kinds_with_prefix.clear()


class NaturalLogSumExp(FlashInferRaggedBackend):
    """The ragged part's log-sum-exp is turned to base e, and ``merge_state`` reads base 2."""

    def merge_state(self, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().merge_state(out_a, lse_a * math.log(2), out_b, lse_b)


class PrefixIsCausal(FlashInferRaggedBackend):
    """The prefix is planned causal, as if the rows were its last ones."""

    def _plan_prefill(self, wrapper: Any, kind: LayerKind, plan: PagePlan, *, causal: bool = True) -> None:
        super()._plan_prefill(wrapper, kind, plan, causal=True)


class WindowOfThePrefix(FlashInferRaggedBackend):
    """The prefix has ``window_left`` instead of a mask, which the kernel counts from the prefix's end."""

    def _plan_prefill(self, wrapper: Any, kind: LayerKind, plan: PagePlan, *, causal: bool = True) -> None:
        for layer_kind, of_prefix in self._prefix.items():
            if of_prefix is wrapper:
                kind, plan = layer_kind, replace(plan, custom_mask=None)
        super()._plan_prefill(wrapper, kind, plan, causal=causal)


class NewRowsAsStored(FlashInferRaggedBackend):
    """Stores first and attends the pool alone, and declares new rows as given."""

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *args: Any, **kwargs: Any) -> torch.Tensor:
        return FlashInferBackend.forward(self, q, k, v, layer, *args, **kwargs)


class RaggedWhateverIsSaved(FlashInferRaggedBackend):
    """Hands k and v to the ragged wrapper where the pool holds the keys already, and neither need be anything."""

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(q, k, v, layer, args[0], save_kv_cache=True)
