"""FlashInfer's MLA wrapper (fa2, fa3): absorbed latent attention for decode, chains of drafts and prefill.

The kernel supports no mask, so verify supports only chains, as rows that are causal over the last keys.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Bounds,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    KVSplit,
    LogSumExp,
    Needs,
    Precision,
    Promises,
    Requires,
    ServerConventions,
)

from .branches import forward_number
from .flashinfer_buffers import GraphBuffers
from .flashinfer_draft import plans_of_forwards
from .flashinfer_kv_splits import merged, part_plan
from .flashinfer_plan import PagePlan, filled_up, workspace
from .vendor import EntryPoint, provide, why_not_here
from .vendor.flashinfer_kernels import BATCH_MLA_FA2, BATCH_MLA_FA3, MERGE_STATE

_PACKAGES = ("flashinfer-python>=0.7.2,<0.8",)
_MODES = frozenset(ForwardMode)
_IN_SPLITS = _MODES - {ForwardMode.DRAFT_DECODE}
_DECODE = frozenset({ForwardMode.DECODE})


class FlashInferMLABackend(AttentionBackend):
    """MLA through ``BatchMLAPagedAttentionWrapper``, backend fa2."""

    not_here = why_not_here(BATCH_MLA_FA2)
    capabilities = Capabilities(
        eager=_MODES,
        graph=_MODES,
        heads=HeadShapes(
            families=frozenset({"mla"}),
            head_dims=frozenset({128, 512}),
            mla_rope_dims=frozenset({64}),
            # Heads and query rows share a tile of 64: the planner refuses tiles that end inside a row.
            gqa_ratios=frozenset({1, 2, 4, 8, 16, 32, 64, 128}),
        ),
        precision=Precision(dtypes=frozenset({"fp16", "bf16"})),
        kv_pool=KVPools(page_sizes=frozenset({1, 16, 32, 64})),
        bounds=Bounds(max_q_rows=16, max_topk=1, max_draft_branches=16),
        promises=Promises(deterministic=True),
        needs=Needs(cpu_seq_lens=True),
        server=ServerConventions(takes_none_kv=True, takes_bare_chains=True, takes_unset_width=True),
        # Several rows are causal over the last keys, which those of a rank are not.
        lse=LogSumExp(base="2", whole=_MODES, prefix=_IN_SPLITS, pages=_DECODE, tokens=_DECODE, merges=True),
        requires=Requires(sm=(80, 129), packages=_PACKAGES),
    )
    entry_point: ClassVar[EntryPoint] = BATCH_MLA_FA2
    kernel_family: ClassVar[str] = "fa2"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._provided = provide(self.entry_point, context.device)
        self._merge = provide(MERGE_STATE, context.device)
        self.kernels = self._provided.kernels
        self._float_workspace = workspace(context.device, self._provided.is_fake)
        # A scale belongs to a plan, not to a run: layers that differ in it need their own wrappers.
        self._scales = list(dict.fromkeys(layer.scaling for layer in context.layers))
        # By scale and forward: 0, but for the later forwards of a draft-decode.
        self._eager: dict[tuple[float, int], Any] = {}
        self._graphs: dict[tuple[ForwardMode, int], dict[tuple[float, int], Any]] = {}
        self._rows: dict[tuple[ForwardMode, int], int] = {}
        """Query rows of each captured graph."""
        self._current: dict[tuple[float, int], Any] = {}
        self._parts = tuple(part for part in context.kv_splits if part.kind != "whole")
        self._eager_parts: dict[tuple[float, KVSplit], Any] = {}
        self._graph_parts: dict[tuple[ForwardMode, int], dict[tuple[float, KVSplit], Any]] = {}
        self._current_parts: dict[tuple[float, KVSplit], Any] = {}

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan the instance's eager wrappers."""
        plans = plans_of_forwards(self.context, batch)
        current = [(scale, forward) for scale in self._scales for forward in range(len(plans))]
        for pair in current:
            if pair not in self._eager:
                self._eager[pair] = self._wrapper()
        if not self._eager_parts:
            self._eager_parts = {pair: self._wrapper() for pair in self._scales_and_parts}
        self._current, self._current_parts = {pair: self._eager[pair] for pair in current}, self._eager_parts
        self._plan_all(plans, batch.forward_mode)
        self._plan_parts(batch, plans[0])

    @property
    def _scales_and_parts(self) -> list[tuple[float, KVSplit]]:
        return [(scale, part) for scale in self._scales for part in self._parts]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate buffers that every bucket's wrappers share; each plan fills them for the next replay."""
        context = self.context
        # One request more than the batch: see _graph_plans.
        self._of_batch = GraphBuffers.of_requests(context, max_bs + 1)
        self._of_forwards = GraphBuffers.of_forwards(context, max_bs)
        self._of_parts = {
            pair: GraphBuffers.of_part(context, max_bs, max_num_tokens) for pair in self._scales_and_parts
        }

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Build the bucket's wrappers at its capture; plan them at the capture and before every replay."""
        bucket = batch.forward_mode, batch.batch_size
        if in_capture:
            self._rows[bucket] = batch.input_ids.shape[0]
        plans = self._graph_plans(batch)
        if in_capture:
            requests = plans[0].kv_lens.shape[0]
            whole = self._of_forwards if batch.forward_mode.is_draft_decode() else (self._of_batch,)
            self._graphs[bucket] = {
                (scale, forward): self._wrapper(use_cuda_graph=True, **whole[forward].for_mla(requests))
                for scale in self._scales
                for forward in range(len(plans))
            }
            self._graph_parts[bucket] = {
                pair: self._wrapper(use_cuda_graph=True, **of_part.for_mla(requests))
                for pair, of_part in self._of_parts.items()
            }
        self._current, self._current_parts = self._graphs[bucket], self._graph_parts[bucket]
        self._plan_all(plans, batch.forward_mode)
        self._plan_parts(batch, plans[0])

    def _graph_plans(self, batch: ForwardBatch) -> tuple[PagePlan, ...]:
        """The plan of each forward, with as many query rows as the graph has.

        The planner gives a request's rows to clusters of two blocks if (rows * heads) / requests is above 64, else to
        clusters of one block, and the resulting grid is fixed in the graph. Ragged modes are captured with all rows of
        the bucket and replayed with fewer: a plan for the other cluster size leaves half of the splits without a block,
        silently (flashinfer 0.7.2, found by this kit on an H200, in draft-extend v1). A last request with the remaining
        rows keeps the quotient constant.

        A graph of one row has no remaining rows and must not get that request: two requests halve the quotient, and
        with 128 heads half a tile is refused if the row's position begins a tile of keys.
        """
        plans = plans_of_forwards(self.context, batch)
        rows = self._rows[batch.forward_mode, batch.batch_size]
        if not batch.forward_mode.is_ragged() or rows == 1:
            return plans
        return (filled_up(plans[0], rows, self.context.page_size),)

    def _wrapper(self, **graph: Any) -> Any:
        return self._provided.call(self._float_workspace, backend=self.kernel_family, **graph)

    def _plan_all(self, plans: tuple[PagePlan, ...], mode: ForwardMode) -> None:
        one_row = mode.is_decode() or mode.is_draft_decode()
        for (scale, forward), wrapper in self._current.items():
            self._plan(wrapper, scale, plans[forward], causal=not one_row)

    def _plan_parts(self, batch: ForwardBatch, plan: PagePlan) -> None:
        causal = not batch.forward_mode.is_decode()
        for (scale, part), wrapper in self._current_parts.items():
            of_part = part_plan(self.context, batch, plan, part, masked=False)
            self._plan(wrapper, scale, of_part, causal=causal and part.kind == "new")

    def _plan(self, wrapper: Any, scale: float, plan: PagePlan, causal: bool) -> None:
        from flashinfer.mla import MLAPlanMetadata

        layer, context = self.context.layers[0], self.context
        wrapper.plan(
            metadata=MLAPlanMetadata.csr(plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_lens),
            num_heads=layer.tp_q_head_num,
            head_dim_ckv=layer.kv_lora_rank,
            head_dim_kpe=layer.head_dim - layer.kv_lora_rank,
            page_size=plan.page_size,
            causal=causal,
            lse_mode="base2" if context.kv_splits else "none",
            sm_scale=scale,
            q_data_type=context.dtype,
            kv_data_type=context.kv_pool.dtype,
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
        """Store the new latent rows and run the wrapper that was planned with this layer's scale."""
        latent, scales = self._stored(k, layer, batch, save_kv_cache, self.context.page_size)
        out: torch.Tensor = self._whole(layer, batch).run(query=q, kv_cache=latent, **scales)
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
        """Attend with the wrapper that was planned for the split's keys, in pages of one slot."""
        whole = part.kind == "whole"
        latent, scales = self._stored(k, layer, batch, save_kv_cache, self.context.page_size if whole else 1)
        wrapper = self._whole(layer, batch) if whole else self._current_parts[layer.scaling, part]
        out, lse = wrapper.run(query=q, kv_cache=latent, return_lse=True, **scales)
        return out, lse

    def _whole(self, layer: AttentionLayer, batch: ForwardBatch) -> Any:
        """Return the wrapper that attends to all keys."""
        return self._current[layer.scaling, forward_number(batch)]

    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``flashinfer.merge_state``."""
        return merged(self._merge.call, out_a, lse_a, out_b, lse_b)

    def _stored(
        self, k: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, save_kv_cache: bool, page_size: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Store the new rows. Returns the latent rows in pages of ``page_size`` slots, and the scales of a run."""
        pool = self.context.kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, batch.out_cache_loc, k)
        latent = pool.get_key_buffer(layer.layer_id).view(-1, page_size, layer.head_dim)
        return latent, {"ckv_scale": layer.k_scale, "kpe_scale": layer.k_scale} if pool.dtype.itemsize == 1 else {}


class FlashInferMLAFA3Backend(FlashInferMLABackend):
    """Latent attention through Hopper's kernel, backend fa3."""

    capabilities = FlashInferMLABackend.capabilities.with_changes(requires=Requires(sm=(90, 90), packages=_PACKAGES))
    entry_point = BATCH_MLA_FA3
    kernel_family = "fa3"


class FlashInferMLAFP8Backend(FlashInferMLAFA3Backend):
    """Latent attention on e4m3 rows with bf16 queries, which exist only on SM90 and at a latent width of 512."""

    capabilities = FlashInferMLAFA3Backend.capabilities.with_changes(
        precision={"dtypes": {"bf16"}}, kv_pool={"kv_dtypes": {"fp8_e4m3"}}, heads={"head_dims": {512}}
    )
