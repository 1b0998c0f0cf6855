"""FlashInfer's prefill in two parts, as servers' documentation describes it: new rows as given, the cached prefix by
page.

The ragged wrapper attends to the step's own k and v, the paged wrapper to the keys in the pool before the step, and
``merge_state`` merges the two; then k and v are stored. So with an FP8 pool new rows are attended to as given.
"""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode, KVSplit, LogSumExp

from .flashinfer import FlashInferBackend, LayerKind
from .flashinfer_plan import PagePlan, prefix_plan
from .vendor import provide
from .vendor.flashinfer_kernels import BATCH_RAGGED

_MODES = frozenset({ForwardMode.EXTEND})


class FlashInferRaggedBackend(FlashInferBackend):
    """Extend through ``BatchPrefillWithRaggedKVCacheWrapper`` and the paged wrapper, merged by log-sum-exp.

    If ``save_kv_cache`` is False the pool holds all keys, and the parent class attends to them in one paged call.
    """

    capabilities = FlashInferBackend.capabilities.with_changes(
        eager=_MODES,
        # Servers run prefill between the pieces of a graph.
        graph=frozenset(),
        bounds={"max_draft_branches": 1, "max_q_rows": 1, "max_topk": 0},
        windows=_MODES,
        options={"non_causal": _MODES},
        precision={"new_rows_as_given": _MODES},
        server={"takes_bare_chains": False, "takes_unset_width": False},
        lse=LogSumExp(base="2", whole=_MODES, merges=True),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        ragged = provide(BATCH_RAGGED, context.device).call
        # k and v of a step are [T, Hk, D], however the pool lies.
        self._ragged = {kind: ragged(self._float_workspace, "NHD", backend="fa2") for kind in self._kinds}
        self._prefix = {kind: self._eager_wrapper(False, kind) for kind in self._kinds}
        self._kinds_with_prefix: set[LayerKind] = set()

    def _plan_all(self, plans: tuple[PagePlan, ...], decode: bool) -> None:
        """Plan both wrappers of each kind of layer, and the parent's wrapper for all keys."""
        super()._plan_all(plans, decode)
        (whole,) = plans
        self._kinds_with_prefix.clear()
        for kind in self._kinds:
            self._plan_ragged(kind, whole.qo_indptr)
            of_prefix = prefix_plan(whole.of_group(kind.group), kind.window)
            # Without a page there is nothing to plan, and nothing to merge.
            if len(of_prefix.kv_indices):
                # The prefix is before every row, and its plan has the pages that the window reaches.
                self._plan_prefill(self._prefix[kind], kind._replace(window=-1), of_prefix, causal=False)
                self._kinds_with_prefix.add(kind)

    def _plan_ragged(self, kind: LayerKind, indptr: torch.Tensor) -> None:
        context = self.context
        self._ragged[kind].plan(
            indptr,
            indptr,
            *kind.heads,
            causal=context.causal,
            window_left=kind.window,
            logits_soft_cap=kind.cap,
            sm_scale=kind.scale,
            q_data_type=context.dtype,
            kv_data_type=context.dtype,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attend to both KV splits, merge them, and store the new rows."""
        if not save_kv_cache:
            return super().forward(q, k, v, layer, batch, save_kv_cache)
        return self._attend(q, k, v, layer, batch)[0]

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        part: KVSplit,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend and return the merged log-sum-exp. ``part`` is the whole: no other KV split is declared."""
        if not save_kv_cache:
            return super().forward_return_lse(q, k, v, layer, batch, save_kv_cache, part=part)
        return self._attend(q, k, v, layer, batch)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = self._kind_of(layer)
        out, lse = self._ragged[kind].run(q, k, v, return_lse=True)
        if kind in self._kinds_with_prefix:
            kv, scales = self._stored(k, v, layer, batch, save_kv_cache=False, page_size=self.context.page_size)
            of_prefix = self._prefix[kind].run(q, kv, return_lse=True, **scales)
            out, lse = self.merge_state(out, lse, *of_prefix)
        group = self.context.group_of(layer)
        group.kv_pool.set_kv_buffer(layer, group.cache_loc(batch), k, v)
        return out, lse
