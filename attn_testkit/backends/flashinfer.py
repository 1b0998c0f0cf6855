"""FlashInfer's paged wrappers (fa2) as servers use them: decode, drafts, target-verify with trees, prefill.

Each kind of layer has a wrapper: scale, window and soft cap belong to a plan, not to a run. Lengths belong to a plan as
well, so a draft-decode has a wrapper for each of its forwards. In a graph each bucket has its own wrappers over shared
persistent buffers, planned again outside the graph before every replay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Bounds,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    HeadShape,
    HeadShapes,
    KVPools,
    KVSplit,
    LayerOptions,
    LogSumExp,
    Needs,
    Precision,
    Promises,
    Requires,
    ServerConventions,
    Windows,
)

from .branches import forward_number, kernel_requests
from .flashinfer_buffers import GraphBuffers
from .flashinfer_draft import plans_of_forwards
from .flashinfer_kv_splits import by_slots, masked_plan, merged, part_plan
from .flashinfer_plan import PagePlan, bytes_of_partials, workspace
from .vendor import provide, why_not_here
from .vendor.flashinfer_kernels import BATCH_DECODE, BATCH_PREFILL, MERGE_STATE

_MODES = frozenset(ForwardMode)
_IN_SPLITS = _MODES - {ForwardMode.DRAFT_DECODE}


class LayerKind(NamedTuple):
    """Properties of a layer on which its plan depends. Layers with equal properties share a wrapper."""

    scale: float
    window: int
    cap: float
    heads: HeadShape
    group: int = 0
    """KV group of the layer: each page table needs its own plan."""

    @classmethod
    def of(cls, layer: AttentionLayer, group: int = 0) -> LayerKind:
        """Return the kind of a layer."""
        return cls(layer.scaling, layer.sliding_window_size, layer.logit_cap, layer.head_shape, group)


class FlashInferBackend(AttentionBackend):
    """MHA, GQA and MQA through ``BatchDecode...`` and ``BatchPrefillWithPagedKVCacheWrapper``."""

    not_here = why_not_here(BATCH_DECODE)
    capabilities = Capabilities(
        eager=_MODES,
        graph=_MODES,
        heads=HeadShapes(
            families=frozenset({"mha", "gqa", "mqa"}),
            # 256 has kernels too. Each head dim is eighteen more modules to compile, and 256 takes the longest.
            head_dims=frozenset({64, 128}),
            gqa_ratios=frozenset({1, 2, 3, 4, 5, 6, 7, 8, 16}),
            heads_by_layer=True,
        ),
        precision=Precision(dtypes=frozenset({"fp16", "bf16"})),
        kv_pool=KVPools(
            kv_dtypes=frozenset({"same", "fp8_e4m3"}),
            page_sizes=frozenset({1, 16, 32, 64}),
            kv_layouts=frozenset({"nhd", "hnd", "kv-in-block"}),
            kv_groups=True,
        ),
        bounds=Bounds(max_q_rows=64, max_topk=64, max_draft_branches=16),
        # With a mask the kernel counts the window by row, and a node's row is not its depth.
        windows=Windows(_MODES, in_trees=False),
        options=LayerOptions(logit_cap=True, non_causal=frozenset({ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})),
        promises=Promises(deterministic=True),
        needs=Needs(cpu_seq_lens=True),
        server=ServerConventions(
            takes_none_kv=True, takes_bare_chains=True, takes_strided_heads=True, takes_unset_width=True
        ),
        lse=LogSumExp(base="2", whole=_MODES, prefix=_IN_SPLITS, pages=_IN_SPLITS, tokens=_IN_SPLITS, merges=True),
        requires=Requires(sm=(80, 129), packages=("flashinfer-python>=0.7.2,<0.8",)),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._decode, self._prefill = provide(BATCH_DECODE, context.device), provide(BATCH_PREFILL, context.device)
        self._merge = provide(MERGE_STATE, context.device)
        self.kernels = self._decode.kernels
        self._kv_layout = "HND" if context.kv_pool.layout == "hnd" else "NHD"
        self._float_workspace = workspace(context.device, self._decode.is_fake, bytes_of_partials(context))
        self._kinds = list(dict.fromkeys(map(self._kind_of, context.layers)))
        # By kind of layer and forward: 0, but for the later forwards of a draft-decode.
        self._eager: dict[tuple[bool, LayerKind, int], Any] = {}
        self._graphs: dict[tuple[ForwardMode, int], dict[tuple[LayerKind, int], Any]] = {}
        self._current: dict[tuple[LayerKind, int], Any] = {}
        self._parts_in_pages = not by_slots(context)
        self._parts = tuple(part for part in context.kv_splits if part.kind != "whole")
        self._eager_parts: dict[tuple[bool, LayerKind, KVSplit], Any] = {}
        self._graph_parts: dict[tuple[ForwardMode, int], dict[tuple[LayerKind, KVSplit], Any]] = {}
        self._current_parts: dict[tuple[LayerKind, KVSplit], Any] = {}

    def _kind_of(self, layer: AttentionLayer) -> LayerKind:
        return LayerKind.of(layer, self.context.group_of(layer).index)

    # ---- planning

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan the instance's eager wrappers."""
        plans, decode = self._plans(batch)
        current = [(kind, forward) for kind in self._kinds for forward in range(len(plans))]
        for kind, forward in current:
            if (decode, kind, forward) not in self._eager:
                self._eager[decode, kind, forward] = self._eager_wrapper(decode, kind)
        self._current = {pair: self._eager[decode, *pair] for pair in current}
        for kind, part in self._kinds_and_splits:
            if (decode, kind, part) not in self._eager_parts:
                self._eager_parts[decode, kind, part] = self._wrapper(kind, *self._form_of_splits(decode))
        self._current_parts = {pair: self._eager_parts[decode, *pair] for pair in self._kinds_and_splits}
        self._plan_all(plans, decode)
        self._plan_parts(batch, plans[0], decode)

    def _plans(self, batch: ForwardBatch) -> tuple[tuple[PagePlan, ...], bool]:
        """The plan of each forward, and True if they have one query row per request or branch."""
        mode = batch.forward_mode
        return plans_of_forwards(self.context, batch), mode.is_decode() or mode.is_draft_decode()

    @property
    def _kinds_and_splits(self) -> list[tuple[LayerKind, KVSplit]]:
        return [(kind, part) for kind in self._kinds for part in self._parts]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate buffers that every bucket's wrappers share; each plan fills them for the next replay."""
        context = self.context
        batch = GraphBuffers.of_requests(context, max_bs, masked=True)
        others = [replace(batch, kv_indices=torch.zeros_like(batch.kv_indices)) for _ in context.groups[1:]]
        self._of_groups = (batch, *others)
        self._of_forwards = GraphBuffers.of_forwards(context, max_bs)
        self._of_parts = {
            pair: GraphBuffers.of_part(context, max_bs, max_num_tokens) for pair in self._kinds_and_splits
        }

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Build the bucket's wrappers at its capture; plan them at the capture and before every replay."""
        plans, decode = self._plans(batch)
        bucket = batch.forward_mode, batch.batch_size
        if in_capture:
            requests, masked = kernel_requests(batch), plans[0].custom_mask is not None
            of_forwards = self._of_forwards if batch.forward_mode.is_draft_decode() else ()
            self._graphs[bucket] = {
                (kind, forward): self._graph_wrapper(
                    kind,
                    of_forwards[forward] if of_forwards else self._of_groups[kind.group],
                    decode,
                    self._kv_layout,
                    requests,
                    masked,
                )
                for kind in self._kinds
                for forward in range(len(plans))
            }
            self._graph_parts[bucket] = {
                (kind, part): self._graph_wrapper(kind, buffers, *self._form_of_splits(decode), requests, masked=True)
                for (kind, part), buffers in self._of_parts.items()
            }
        self._current, self._current_parts = self._graphs[bucket], self._graph_parts[bucket]
        self._plan_all(plans, decode)
        self._plan_parts(batch, plans[0], decode)

    def _tensor_cores(self, kind: LayerKind) -> bool:
        """True if decode runs the prefill kernel. Each wrapper chooses by the heads of its layers."""
        return kind.heads.num_qo_heads >= 4 * kind.heads.num_kv_heads or self.context.kv_pool.dtype.itemsize == 1

    def _eager_wrapper(self, decode: bool, kind: LayerKind) -> Any:
        return self._wrapper(kind, decode, self._kv_layout)

    def _graph_wrapper(
        self,
        kind: LayerKind,
        buffers: GraphBuffers,
        decode: bool,
        kv_layout: str,
        requests: int,
        masked: bool,
    ) -> Any:
        given = buffers.for_decode(requests) if decode else buffers.for_prefill(requests, masked)
        return self._wrapper(kind, decode, kv_layout, use_cuda_graph=True, **given)

    def _form_of_splits(self, decode: bool) -> tuple[bool, str]:
        """Form of the wrapper of a KV split: True for the decode wrapper, and the layout of its pages."""
        own = self._parts_in_pages or self.context.page_size == 1
        return decode and not self._parts_in_pages, self._kv_layout if own else "NHD"

    def _wrapper(self, kind: LayerKind, decode: bool, kv_layout: str, **graph: Any) -> Any:
        if decode:
            graph["use_tensor_cores"] = self._tensor_cores(kind)
        make = self._decode.call if decode else self._prefill.call
        return make(self._float_workspace, kv_layout, backend="fa2", **graph)

    def _plan_all(self, plans: tuple[PagePlan, ...], decode: bool) -> None:
        for (kind, forward), wrapper in self._current.items():
            plan = plans[forward].of_group(kind.group)
            if decode:
                self._plan_decode(wrapper, kind, plan)
            else:
                self._plan_prefill(wrapper, kind, plan)

    def _plan_parts(self, batch: ForwardBatch, plan: PagePlan, decode: bool) -> None:
        decode, _ = self._form_of_splits(decode)
        plan_wrapper = self._plan_decode if decode else self._plan_prefill
        for (kind, part), wrapper in self._current_parts.items():
            if self._parts_in_pages:
                of_part = masked_plan(plan, part, window=kind.window, causal=self.context.causal)
            else:
                of_part = part_plan(self.context, batch, plan, part, window=kind.window, masked=not decode)
            plan_wrapper(wrapper, kind._replace(window=-1), of_part)

    def _plan_decode(self, wrapper: Any, kind: LayerKind, plan: PagePlan) -> None:
        context = self.context
        wrapper.plan(
            plan.kv_indptr,
            plan.kv_indices,
            plan.last_page_len,
            *kind.heads,
            plan.page_size,
            window_left=kind.window,
            logits_soft_cap=kind.cap,
            sm_scale=kind.scale,
            q_data_type=context.dtype,
            kv_data_type=context.kv_pool.dtype,
        )

    def _plan_prefill(self, wrapper: Any, kind: LayerKind, plan: PagePlan, *, causal: bool = True) -> None:
        """Plan prefill wrappers. ``causal``: rows see no later key, if there is no mask and the model is causal."""
        context = self.context
        wrapper.plan(
            plan.qo_indptr,
            plan.kv_indptr,
            plan.kv_indices,
            plan.last_page_len,
            *kind.heads,
            plan.page_size,
            custom_mask=plan.custom_mask,
            causal=causal and plan.custom_mask is None and context.causal,
            window_left=kind.window,
            logits_soft_cap=kind.cap,
            sm_scale=kind.scale,
            q_data_type=context.dtype,
            kv_data_type=context.kv_pool.dtype,
        )

    # ---- running

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Store the new rows and run the wrapper that was planned for this layer's kind."""
        kv, scales = self._stored(k, v, layer, batch, save_kv_cache, self.context.page_size)
        out: torch.Tensor = self._whole(layer, batch).run(q, kv, **scales)
        return out

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
        """Attend with the wrapper that was planned for the split's keys, in pages of one slot if the pool has them."""
        whole = part.kind == "whole"
        page_size = self.context.page_size if whole or self._parts_in_pages else 1
        kv, scales = self._stored(k, v, layer, batch, save_kv_cache, page_size)
        wrapper = self._whole(layer, batch) if whole else self._current_parts[self._kind_of(layer), part]
        out, lse = wrapper.run(q, kv, return_lse=True, **scales)
        return out, lse

    def _whole(self, layer: AttentionLayer, batch: ForwardBatch) -> Any:
        """Return the wrapper that attends to all keys."""
        return self._current[self._kind_of(layer), forward_number(batch)]

    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``flashinfer.merge_state``."""
        return merged(self._merge.call, out_a, lse_a, out_b, lse_b)

    def _stored(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool,
        page_size: int,
    ) -> tuple[Any, dict[str, float]]:
        """Store the new rows. Returns K and V in pages of ``page_size`` slots, and the scales of a run."""
        group = self.context.group_of(layer)
        pool = group.kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, group.cache_loc(batch), k, v)
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if pool.dtype.itemsize == 1 else {}
        if page_size != self.context.page_size:
            return tuple(buffer[:, None] for buffer in pool.get_kv_buffer(layer.layer_id)), scales
        # Of K and V in one block the package takes the block itself.
        kv: Any = pool.get_layer_buffer(layer.layer_id)
        return kv if pool.layout == "kv-in-block" else kv.unbind(0), scales
