"""KV splits: a wrapper between the model and a backend that returns log-sum-exps.

The wrapper is a backend to the model. It calls the real backend for each split of a request's keys, as a server with a
cached prefix or with context-parallel ranks does, and merges the results. Device work only, so all of it may be
captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, KVSplit
from attn_testkit.model import Trace

from .harness import ServerHarness
from .ranks import Ranks
from .returned import check_returned


def merged(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], base: str) -> torch.Tensor:
    """Merge KV splits as a server does: [T, Hq, Dv] in their dtype, weighted by the exponentials, in float32.

    ``outs``: [T, Hq, Dv] each; ``lses``: [T, Hq] each, in ``base``. A weight of 0 is multiplied like any other, so NaN
    of an empty split reaches the result. Rows without a key in any split are zeros.
    """
    # The bits of a row must not depend on other rows. On a CPU ``exp`` of a tensor's last elements is another function
    # than ``exp`` of whole vectors, and the order of a sum depends on the size. Rounding float64 hides the difference.
    lse = torch.stack(list(lses)).double() * (math.log(2) if base == "2" else 1.0)
    top = lse.amax(0)
    weights = torch.exp(lse - torch.where(top == -torch.inf, 0.0, top)).float().unbind()
    total = reduce(torch.add, weights)
    sums = reduce(torch.add, (weight[..., None] * out.float() for weight, out in zip(weights, outs, strict=True)))
    return (sums / torch.where(total == 0, 1.0, total)[..., None]).to(outs[0].dtype)


class InParts:
    """A backend that attends to the KV splits of its context, for one forward of the model."""

    def __init__(self, harness: ServerHarness) -> None:
        declared = harness.capabilities.lse
        assert declared is not None, "cases with KV splits are for backends that declare a log-sum-exp"
        self._harness, self._capabilities, self._own = harness, declared, harness.case.merged_by_backend
        self._lse: list[torch.Tensor] = []
        self._finite: list[torch.Tensor] = []
        self._returned: list[torch.Tensor] = []

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to all splits [T, Hq, Dv]; the first stores the new rows, or each rank its own. Raises ``ShapeError``;
        passes errors on."""
        found: dict[KVSplit, tuple[torch.Tensor, torch.Tensor]] = {}
        parts = self._harness.context.kv_splits
        for part in parts[:: -1 if self._harness.ranks_in_reverse else 1]:
            # Each rank with its own pool stores its own tokens.
            stores = save_kv_cache and (part.own_pool or not found)
            named: dict[str, Any] = {} if stores else {"save_kv_cache": False}
            if selected is not None:
                named["selected"] = selected
            given = self._harness.backend.forward_return_lse(q, k, v, layer, batch, **named, part=part)
            out, lse = self._checked(given, layer, q.shape[0], f"layer {layer.layer_id}, {part}")
            # The next split may get the same memory.
            found[part] = out.clone(), lse.clone()
        outs, lses = ([found[part][index] for part in parts] for index in range(2))
        self._finite.append(torch.stack([out.isfinite().flatten(1).all(-1) for out in outs], 1))
        if self._own:
            whole = self._merged_by_backend(outs, lses, layer)
        else:
            whole = merged(outs, [self._by_row(lse) for lse in lses], self._capabilities.base)
        self._lse.append(torch.stack([self._by_row(lse) for lse in lses], 1))
        return whole

    def leave_in(self, trace: Trace) -> None:
        """Add everything that is checked, and that a replay must write, to the trace of the forward."""
        trace.lse, trace.part_finite, trace.of_parts = self._lse, self._finite, self._returned

    def _merged_by_backend(
        self, outs: Sequence[torch.Tensor], lses: list[torch.Tensor], layer: AttentionLayer
    ) -> torch.Tensor:
        """Merge the last two splits, and so on to the first; ``lses`` gets the last log-sum-exp.

        In this order, two empty splits of short requests are merged, like chunks of a prefix (vLLM #39148). Each rank
        with its own pool merges its own partial result with that of all ranks after it, so all but the last merge.
        """
        whole, backend = (outs[-1], lses[-1]), self._harness.backend
        merging = backend.instances if isinstance(backend, Ranks) else [backend] * len(outs)
        for one, out, lse in zip(merging[-2::-1], outs[-2::-1], lses[-2::-1], strict=True):
            given = one.merge_state(out, lse, *whole)
            whole = self._checked(given, layer, out.shape[0], f"merge_state in layer {layer.layer_id}")
        lses.append(whole[1])
        return whole[0]

    def _by_row(self, lse: torch.Tensor) -> torch.Tensor:
        """A view [T, Hq], whatever the layout."""
        return lse if self._capabilities.layout == "[T, H]" else lse.t()

    def _checked(self, given: object, layer: AttentionLayer, rows: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Check a result; return the output [T, Hq, Dv] and the log-sum-exp."""
        context, heads, dim = self._harness.context, layer.tp_q_head_num, layer.v_head_dim
        pair: Any = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, None)
        out, lse = pair
        shapes = ((rows, heads, dim), (rows, heads * dim))
        check_returned(name, out, shapes, context.dtype, self._harness.device)
        in_model = self._capabilities.dtype == "model"
        dtype, shape = context.dtype if in_model else torch.float32, (rows, heads)
        if self._capabilities.layout != "[T, H]":
            shape = shape[::-1]
        whose = "as declared the model's" if in_model else "as declared"
        check_returned(f"{name}, as its log-sum-exp,", lse, (shape,), dtype, self._harness.device, whose)
        self._returned += [out, lse]
        return out.reshape(rows, heads, dim), lse
