"""FlashInfer's paged wrappers (fa2) as servers use them: decode, target-verify with trees, draft-extends, prefill.

One wrapper for each kind of layer: scale, window and soft cap belong to a plan, not to a run. In a graph each bucket
has wrappers of its own over shared persistent buffers, planned anew outside the graph before every replay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    Requires,
)

from .flashinfer_plan import PagePlan, make_page_plan, pages_per_request, workspace
from .vendor import provide
from .vendor.flashinfer_fake import BATCH_DECODE, BATCH_PREFILL

__all__ = ["FlashInferBackend", "LayerKind"]


class LayerKind(NamedTuple):
    """What a plan knows of a layer. Layers that agree in it share a wrapper."""

    scale: float
    window: int
    cap: float
    group: int = 0
    """Its KV group: another table is another plan."""

    @classmethod
    def of(cls, layer: AttentionLayer, group: int = 0) -> LayerKind:
        """The kind of a layer."""
        return cls(layer.scaling, layer.sliding_window_size, layer.logit_cap, group)


class FlashInferBackend(AttentionBackend):
    """MHA, GQA and MQA through ``BatchDecode...`` and ``BatchPrefillWithPagedKVCacheWrapper``."""

    capabilities = Capabilities(
        eager=frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE},
        graph=frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE},
        families=frozenset({"mha", "gqa", "mqa"}),
        dtypes=frozenset({"fp16", "bf16"}),
        kv_dtypes=frozenset({"same", "fp8_e4m3"}),
        # 256 has kernels too. Each head dim is eighteen more modules to compile, and 256 takes the longest.
        head_dims=frozenset({64, 128}),
        page_sizes=frozenset({1, 16, 32, 64}),
        gqa_ratios=frozenset({1, 2, 3, 4, 5, 6, 7, 8, 16}),
        max_q_rows=64,
        max_topk=64,
        sliding_window=frozenset(ForwardMode),
        # With a mask the kernel counts the window by row, and a node's row is not its depth.
        window_in_trees=False,
        logit_cap=True,
        deterministic=True,
        needs_cpu_seq_lens=True,
        takes_none_kv=True,
        takes_unset_width=True,
        kv_groups=True,
        requires=Requires(sm=(80, 129), packages=("flashinfer-python>=0.7.2,<0.8",)),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._decode, self._prefill = provide(BATCH_DECODE, context.device), provide(BATCH_PREFILL, context.device)
        fake = self._decode.is_fake or self._prefill.is_fake
        self.kernels = "emulated" if fake else "real"
        first = context.layers[0]
        self._tensor_cores = first.q_per_kv >= 4 or context.kv_pool.dtype.itemsize == 1
        self._float_workspace = workspace(context.device, fake)
        kinds = (LayerKind.of(layer, context.group_of(layer).index) for layer in context.layers)
        self._kinds = list(dict.fromkeys(kinds))
        self._eager: dict[tuple[bool, LayerKind], Any] = {}
        self._graphs: dict[tuple[ForwardMode, int], dict[LayerKind, Any]] = {}
        self._current: dict[LayerKind, Any] = {}

    # ---- planning

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan the instance's eager wrappers."""
        plan, decode = make_page_plan(self.context, batch), batch.forward_mode.is_decode()
        for kind in self._kinds:
            if (decode, kind) not in self._eager:
                self._eager[decode, kind] = self._eager_wrapper(decode)
        self._current = {kind: self._eager[decode, kind] for kind in self._kinds}
        self._plan_all(plan, decode)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers that every bucket's wrappers share; each plan fills them for the replay that follows."""
        context = self.context
        pages = pages_per_request(context)

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=context.device)

        self._qo_indptr, self._kv_indptr = zeros(max_bs + 1), zeros(max_bs + 1)
        self._last_page_len, self._kv_indices = zeros(max_bs), zeros(max_bs * pages)
        self._other_indices = tuple(zeros(max_bs * pages) for _ in context.groups[1:])
        n = context.num_draft_tokens
        self._mask_bytes = zeros(max_bs * (-(-n * pages * context.page_size // 8)), torch.uint8)
        self._mask_indptr = zeros(max_bs + 1)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Build the bucket's wrappers at its capture; plan them at the capture and before every replay."""
        plan, decode = make_page_plan(self.context, batch), batch.forward_mode.is_decode()
        bucket = batch.forward_mode, batch.batch_size
        if in_capture:
            # A wrapper that was given a mask buffer is in custom-mask mode for ever, whatever later plans say.
            masked = plan.custom_mask is not None
            self._graphs[bucket] = {
                kind: self._graph_wrapper(decode, batch.batch_size, masked, kind.group) for kind in self._kinds
            }
        self._current = self._graphs[bucket]
        self._plan_all(plan, decode)

    def _eager_wrapper(self, decode: bool) -> Any:
        if decode:
            return self._decode.call(self._float_workspace, "NHD", use_tensor_cores=self._tensor_cores, backend="fa2")
        return self._prefill.call(self._float_workspace, "NHD", backend="fa2")

    def _graph_wrapper(self, decode: bool, bs: int, masked: bool, group: int) -> Any:
        indices = self._other_indices[group - 1] if group else self._kv_indices
        if decode:
            return self._decode.call(
                self._float_workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=self._tensor_cores,
                paged_kv_indptr_buffer=self._kv_indptr[: bs + 1],
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=self._last_page_len[:bs],
                backend="fa2",
            )
        return self._prefill.call(
            self._float_workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._qo_indptr[: bs + 1],
            paged_kv_indptr_buf=self._kv_indptr[: bs + 1],
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=self._last_page_len[:bs],
            custom_mask_buf=self._mask_bytes if masked else None,
            mask_indptr_buf=self._mask_indptr[: bs + 1] if masked else None,
            backend="fa2",
        )

    def _plan_all(self, plan: PagePlan, decode: bool) -> None:
        for kind, wrapper in self._current.items():
            if decode:
                self._plan_decode(wrapper, kind, plan.of_group(kind.group))
            else:
                self._plan_prefill(wrapper, kind, plan.of_group(kind.group))

    def _plan_decode(self, wrapper: Any, kind: LayerKind, plan: PagePlan) -> None:
        layer, context = self.context.layers[0], self.context
        wrapper.plan(
            plan.kv_indptr,
            plan.kv_indices,
            plan.last_page_len,
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.head_dim,
            context.page_size,
            window_left=kind.window,
            logits_soft_cap=kind.cap,
            sm_scale=kind.scale,
            q_data_type=context.dtype,
            kv_data_type=context.kv_pool.dtype,
        )

    def _plan_prefill(self, wrapper: Any, kind: LayerKind, plan: PagePlan) -> None:
        layer, context = self.context.layers[0], self.context
        wrapper.plan(
            plan.qo_indptr,
            plan.kv_indptr,
            plan.kv_indices,
            plan.last_page_len,
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.head_dim,
            context.page_size,
            custom_mask=plan.custom_mask,
            causal=plan.custom_mask is None,
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
        group, page_size = self.context.group_of(layer), self.context.page_size
        pool = group.kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, group.cache_loc(batch), k, v)
        key, value = (buffer.view(-1, page_size, *buffer.shape[1:]) for buffer in pool.get_kv_buffer(layer.layer_id))
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if pool.dtype.itemsize == 1 else {}
        out: torch.Tensor = self._current[LayerKind.of(layer, group.index)].run(q, (key, value), **scales)
        return out
