"""Mistakes that real adapters of FlashInfer have made, each put back into a copy of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_testkit.backends.flashinfer import FlashInferBackend, LayerKind
from attn_testkit.backends.flashinfer_draft import plans_of_forwards
from attn_testkit.backends.flashinfer_mla import FlashInferMLABackend, FlashInferMLAFP8Backend
from attn_testkit.backends.flashinfer_plan import PagePlan, exclusive_sum
from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode


class MaskLeftOver(FlashInferBackend):
    """Gives every wrapper the mask buffer, which is what selects the custom-mask mode (flashinfer #1028)."""

    def _graph_wrapper(self, kind: LayerKind, buffers: Any, decode: bool, *more: Any, **masked: Any) -> Any:
        kv_layout, requests, *_ = more
        return super()._graph_wrapper(kind, buffers, decode, kv_layout, requests, masked=not decode)


class SoftCapForgottenInPlan(FlashInferBackend):
    """Leaves the cap out of ``plan``, and the model runs uncapped (sglang #33915)."""

    def _plan_decode(self, wrapper: Any, kind: LayerKind, plan: PagePlan) -> None:
        super()._plan_decode(wrapper, kind._replace(cap=0.0), plan)


class SoftCapGivenToForward(SoftCapForgottenInPlan):
    """Gives the cap to the wrapper's older call, which takes it and cannot use it (sglang #33915)."""

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *args: Any, **kwargs: Any) -> torch.Tensor:
        wrapper, kind = self._current[LayerKind.of(layer), 0], LayerKind.of(layer)
        wrapper.run = _older_call(wrapper, kind)
        try:
            return super().forward(q, k, v, layer, *args, **kwargs)
        finally:
            del wrapper.run


def _older_call(wrapper: Any, kind: LayerKind) -> Any:
    def call(q: torch.Tensor, cache: Any) -> torch.Tensor:
        del wrapper.run
        try:
            return wrapper.forward(q, cache, window_left=kind.window, logits_soft_cap=kind.cap, sm_scale=kind.scale)
        finally:
            wrapper.run = call

    return call


class WindowGivenToRun(FlashInferBackend):
    """Gives the window to ``run`` alone, which insists that it is the planned one (sglang #31501)."""

    def _plan_prefill(self, wrapper: Any, kind: LayerKind, plan: PagePlan, *, causal: bool = True) -> None:
        super()._plan_prefill(wrapper, kind._replace(window=-1), plan, causal=causal)

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *args: Any, **kwargs: Any) -> torch.Tensor:
        wrapper = self._current[LayerKind.of(layer), 0]
        run = wrapper.run
        wrapper.run = lambda *a, **key: run(*a, window_left=layer.sliding_window_size, **key)
        try:
            return super().forward(q, k, v, layer, *args, **kwargs)
        finally:
            del wrapper.run


class WindowOfW(FlashInferBackend):
    """Takes ``window_left`` for the number of keys; it is inclusive, and the row itself is one more."""

    def _plan_decode(self, wrapper: Any, kind: LayerKind, plan: PagePlan) -> None:
        window = kind.window - 1 if kind.window > 0 else kind.window
        super()._plan_decode(wrapper, kind._replace(window=window), plan)


class PlansAtCaptureOnly(FlashInferBackend):
    """Updates nothing before a replay (rtp-llm #378, #1084)."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture:
            super().init_forward_metadata_out_graph(batch, in_capture)


class FillsBuffersWithoutPlanning(FlashInferBackend):
    """Writes lengths and pages into the wrapper's buffers and keeps the schedule of the capture (rtp-llm #378)."""

    def _plan_all(self, plans: tuple[PagePlan, ...], decode: bool) -> None:
        wrappers = list(self._current.values())
        if not decode or not wrappers[0].is_cuda_graph_enabled or not hasattr(wrappers[0], "_plan_info"):
            super()._plan_all(plans, decode)
            return
        (plan,) = plans
        for name in ("kv_indptr", "kv_indices", "last_page_len"):
            new = getattr(plan, name)
            getattr(self._of_groups[0], name)[: len(new)].copy_(new)


class NewWrapperAtReplay(FlashInferBackend):
    """Makes the bucket's wrappers anew before each replay: the graph keeps reading the old ones' schedule."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture=True)


class OneKindForAllLayers(FlashInferBackend):
    """Plans with the first layer's scale, window and cap for the whole model."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._kinds = self._kinds[:1]

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *args: Any, **kwargs: Any) -> torch.Tensor:
        (wrapper,) = self._current.values()
        self._current = {(self._kinds[0], 0): wrapper, (LayerKind.of(layer), 0): wrapper}
        try:
            return super().forward(q, k, v, layer, *args, **kwargs)
        finally:
            self._current = {(self._kinds[0], 0): wrapper}


class LastPageByRemainder(FlashInferBackend):
    """``kv_len % page_size``: 0 where the last page is full."""

    def _plan_decode(self, wrapper: Any, kind: LayerKind, plan: PagePlan) -> None:
        last = plan.kv_lens % self.context.page_size
        super()._plan_decode(wrapper, kind, replace(plan, last_page_len=last))


class DraftsNotCounted(FlashInferBackend):
    """Takes the ``seq_lens`` of target-verify for all keys; they are the prefix alone."""

    def _plan_prefill(self, wrapper: Any, kind: LayerKind, plan: PagePlan, *, causal: bool = True) -> None:
        lens = plan.kv_lens - (plan.qo_indptr[1:] - plan.qo_indptr[:-1])
        lens = lens.clamp(min=1)
        pages = -(-lens // self.context.page_size)
        kept = torch.cat(
            [
                plan.kv_indices[start : start + count]
                for start, count in zip(plan.kv_indptr.tolist(), pages.tolist(), strict=False)
            ]
        )
        shorter = replace(
            plan,
            kv_lens=lens,
            kv_indptr=exclusive_sum(pages),
            kv_indices=kept,
            last_page_len=lens - (pages - 1) * self.context.page_size,
            custom_mask=None,
        )
        super()._plan_prefill(wrapper, kind, shorter, causal=causal)


class ScalesOfFp8Forgotten(FlashInferBackend):
    """Stored keys and values are taken as they are."""

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.context.kv_pool.set_kv_buffer(layer, args[0].out_cache_loc, k, v)
        plain = replace(layer, k_scale=1.0, v_scale=1.0)
        return super().forward(q, k, v, plain, *args, save_kv_cache=False)


class LengthsOfTheFirstForward(FlashInferBackend):
    """Plans a draft once, and each forward runs what was planned for the first: it misses its branch's own tokens."""

    def _plans(self, batch: ForwardBatch) -> tuple[tuple[PagePlan, ...], bool]:
        plans, decode = super()._plans(batch)
        return plans[:1] * len(plans), decode


class OneBufferForAllForwards(FlashInferMLABackend):
    """The wrappers of a draft's forwards share their buffers in a graph: what the last plan left is what all read."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self._of_forwards = self._of_forwards[:1] * len(self._of_forwards)


class LengthsOfThePrefix(FlashInferMLABackend):
    """``kv_len_arr`` of the prefix beside an indptr that counts the new keys (checked since flashinfer 0.7.0)."""

    def _plan(self, wrapper: Any, scale: float, plan: PagePlan, causal: bool) -> None:
        rows = plan.qo_indptr[1:] - plan.qo_indptr[:-1]
        super()._plan(wrapper, scale, replace(plan, kv_lens=plan.kv_lens - rows), causal)


class RunInPagesOfOneSlot(FlashInferMLABackend):
    """A run is given the pool in pages of one slot, and was planned for the pages that the pool has."""

    def _stored(self, *args: Any, **more: Any) -> Any:
        return super()._stored(*args[:-1], 1, **more)


class VerifyNotCausal(FlashInferMLABackend):
    """Every node of a chain sees the nodes after it."""

    def _plan(self, wrapper: Any, scale: float, plan: PagePlan, causal: bool) -> None:
        super()._plan(wrapper, scale, plan, causal=False)


class ScaleOfTheWidth(FlashInferMLABackend):
    """1 / sqrt(latent + rope) instead of the layer's scale, which comes from the widths before absorption."""

    def _plan(self, wrapper: Any, scale: float, plan: PagePlan, causal: bool) -> None:
        super()._plan(wrapper, self.context.layers[0].head_dim ** -0.5, plan, causal)


class MLAPlansAtCaptureOnly(FlashInferMLABackend):
    """Updates nothing before a replay."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture:
            super().init_forward_metadata_out_graph(batch, in_capture)


class OtherClusterSizeAtReplay(FlashInferMLABackend):
    """Plans a v1 replay for the accepted rows alone, which may ask for another grid than the captured one."""

    def _graph_plans(self, batch: ForwardBatch) -> tuple[PagePlan, ...]:
        return plans_of_forwards(self.context, batch)


class UniformStrideInV1(FlashInferMLABackend):
    """Query offsets at the stride of the capture, where v1 packs accepted rows (sglang #21987 the other way round)."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        spec = batch.spec_info
        if batch.forward_mode is ForwardMode.DRAFT_EXTEND and not in_capture:
            spec.num_accept_tokens_cpu = [self.context.speculative_num_steps + 1] * batch.batch_size  # type: ignore[union-attr]
        super().init_forward_metadata_out_graph(batch, in_capture)


class RopeScaleForgotten(FlashInferMLAFP8Backend):
    """The latent part of an FP8 row is scaled, its rope part is not."""

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, *args: Any, **kwargs: Any) -> torch.Tensor:
        wrapper = self._current[layer.scaling, 0]
        run = wrapper.run
        wrapper.run = lambda **key: run(**{**key, "kpe_scale": 1.0})
        try:
            return super().forward(q, k, v, layer, *args, **kwargs)
        finally:
            del wrapper.run
