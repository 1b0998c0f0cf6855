"""Class N: promised bits: the same batch twice, and a request in other company."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..contract import AttentionLayer, BackendContext, ForwardMode
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = tuple(ForwardMode)


def _singly(rows: torch.Tensor) -> list[torch.Tensor]:
    """Views of one row each, which keep their first dimension."""
    return [rows[i : i + 1] for i in range(len(rows))]


class _Invariant(PlannedBackend):
    """Healthy: how keys are split depends on the request's own length alone, so its bits do not depend on others.

    Requests are computed one by one: a batched matrix product chooses its way of summing by the size of the batch.
    """

    capabilities = PlannedBackend.capabilities.with_changes(batch_invariant=True)

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        one_by_one = zip(_singly(rows), _singly(keys), strict=True)
        return torch.cat([super(_Invariant, self).logits(q, k, layer) for q, k in one_by_one])

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        for one in zip(*(_singly(x) for x in (logits, seen, values, acc, lse)), strict=True):
            super().partials(*one)


@fault(
    slug="split-count-depends-on-batchmates",
    bug_class="N",
    source="flash-attention #2450; aiter #4378; FlashMLA #212",
    modes=_ALL,
    executions=("eager",),
    mechanism="the number of splits comes from the whole batch, so a row's order of summation depends on other rows",
    promises=("batch-invariant",),
    hint="depends on the rest of the batch",
)
class SplitsDependOnBatchmates(_Invariant):
    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return super().plan_splits(lens.amax().expand_as(lens))


@fault(
    slug="fixed-split-dropped-on-swa-path",
    bug_class="N",
    source="sglang #26412",
    modes=_ALL,
    executions=("eager",),
    mechanism="the deterministic split size is passed on by every path but the windowed one",
    promises=("batch-invariant",),
    hint="layer 0",
)
class FixedSplitDroppedForWindows(_Invariant):
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        if layer.sliding_window_size >= 0:
            meta = replace(meta, chunk=self.plan_splits(meta.kv_lens.amax().expand_as(meta.kv_lens)))
        return super().attend(q, layer, meta)


@fault(
    slug="split-size-from-batch-size",
    bug_class="N",
    source="general",
    modes=_ALL,
    executions=("eager",),
    mechanism="with few requests keys are split further to fill the device",
    promises=("batch-invariant",),
    hint="depends on the rest of the batch",
)
class SplitsFromBatchSize(_Invariant):
    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return super().plan_splits(lens) if len(lens) > 1 else lens.clamp(min=1)


@fault(
    slug="order-of-sums-varies",
    bug_class="N",
    source="general",
    modes=_ALL,
    executions=("eager",),
    mechanism="partial sums are added in the order in which they arrive, and determinism is claimed",
    promises=("repeatable",),
    hint="atomics",
    modelled="every other call adds the splits backwards",
)
class OrderOfSumsVaries(PlannedBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.calls = 0

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        self.calls += 1
        top = lse.amax(1, keepdim=True).clamp(min=-1e30)
        weight = torch.exp(lse - top)
        order = range(self.max_splits) if self.calls // len(self.context.layers) % 2 else range(self.max_splits)[::-1]
        total = sum(((acc[:, i] * weight[:, i, ..., None]) for i in order), torch.zeros_like(acc[:, 0]))
        sink = 0.0 if layer.sinks is None else torch.exp(layer.sinks - top[:, 0])
        return total / (weight.sum(1) + sink).clamp(min=1e-30)[..., None]


@fault(
    slug="first-call-tunes",
    bug_class="N",
    source="general",
    modes=_ALL,
    executions=("eager",),
    mechanism="the first call of a shape runs an untuned kernel, and later calls run the one that was found to be "
    "fastest",
    promises=("repeatable",),
    hint="split count",
)
class FirstCallTunes(PlannedBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.tuned = False

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        tuned, self.tuned = self.tuned, True
        return super().plan_splits(lens) if tuned else lens.clamp(min=1)
