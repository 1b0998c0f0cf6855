"""FlashInfer's MLA wrapper (fa2, fa3): absorbed latent attention for decode, chains of drafts and prefill.

The kernel knows no mask: verify takes chains only, as rows that are causal over the last keys.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    KVPart,
    LogSumExp,
    Requires,
)

from .flashinfer_parts import MERGE_STATE, PartBuffers, part_plan
from .flashinfer_plan import PagePlan, filled_up, make_page_plan, pages_per_request, workspace
from .vendor import EntryPoint, provide
from .vendor.flashinfer_fake import BATCH_MLA_FA2, BATCH_MLA_FA3

__all__ = ["FlashInferMLABackend", "FlashInferMLAFA3Backend", "FlashInferMLAFP8Backend"]

_PACKAGES = ("flashinfer-python>=0.7.2,<0.8",)
_MODES = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
_DECODE = frozenset({ForwardMode.DECODE})


class FlashInferMLABackend(AttentionBackend):
    """MLA through ``BatchMLAPagedAttentionWrapper``, backend fa2."""

    capabilities = Capabilities(
        eager=_MODES,
        graph=_MODES,
        families=frozenset({"mla"}),
        dtypes=frozenset({"fp16", "bf16"}),
        head_dims=frozenset({128, 512}),
        mla_rope_dims=frozenset({64}),
        page_sizes=frozenset({1, 16, 32, 64}),
        # Heads and query rows share a tile of 64: the planner refuses tiles that end inside a row.
        gqa_ratios=frozenset({1, 2, 4, 8, 16, 32, 64, 128}),
        max_q_rows=16,
        max_topk=1,
        deterministic=True,
        needs_cpu_seq_lens=True,
        takes_none_kv=True,
        takes_bare_chains=True,
        takes_unset_width=True,
        # Several rows are causal over the last keys, which those of a rank are not.
        lse=LogSumExp(base="2", whole=_MODES, prefix=_MODES, pages=_DECODE, tokens=_DECODE, merges=True),
        requires=Requires(sm=(80, 129), packages=_PACKAGES),
    )
    entry_point: ClassVar[EntryPoint] = BATCH_MLA_FA2
    kernel_family: ClassVar[str] = "fa2"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._provided = provide(self.entry_point, context.device)
        self._merge = provide(MERGE_STATE, context.device)
        self.kernels = "emulated" if self._provided.is_fake or self._merge.is_fake else "real"
        self._float_workspace = workspace(context.device, self._provided.is_fake)
        # A scale belongs to a plan, not to a run: layers that differ in it need wrappers of their own.
        self._scales = list(dict.fromkeys(layer.scaling for layer in context.layers))
        self._eager: dict[float, Any] = {}
        self._graphs: dict[tuple[ForwardMode, int], dict[float, Any]] = {}
        self._rows: dict[tuple[ForwardMode, int], int] = {}
        """Query rows of each captured graph."""
        self._current: dict[float, Any] = {}
        self._parts = tuple(part for part in context.kv_parts if part.kind != "whole")
        self._eager_parts: dict[tuple[float, KVPart], Any] = {}
        self._graph_parts: dict[tuple[ForwardMode, int], dict[tuple[float, KVPart], Any]] = {}
        self._current_parts: dict[tuple[float, KVPart], Any] = {}

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan the instance's eager wrappers."""
        if not self._eager:
            self._eager = {scale: self._wrapper() for scale in self._scales}
            self._eager_parts = {pair: self._wrapper() for pair in self._scales_and_parts}
        self._current, self._current_parts = self._eager, self._eager_parts
        plan = make_page_plan(self.context, batch)
        self._plan_all(plan, batch.forward_mode)
        self._plan_parts(batch, plan)

    @property
    def _scales_and_parts(self) -> list[tuple[float, KVPart]]:
        return [(scale, part) for scale in self._scales for part in self._parts]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers that every bucket's wrappers share; each plan fills them for the replay that follows."""
        pages = pages_per_request(self.context)

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self.context.device)

        # One request more than the batch: see _graph_plan.
        self._qo_indptr, self._kv_indptr = zeros(max_bs + 2), zeros(max_bs + 2)
        self._kv_lens, self._kv_indices = zeros(max_bs + 1), zeros((max_bs + 1) * pages)
        self._of_parts = {pair: PartBuffers(self.context, max_bs, max_num_tokens) for pair in self._scales_and_parts}

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Build the bucket's wrappers at its capture; plan them at the capture and before every replay."""
        bucket = batch.forward_mode, batch.batch_size
        if in_capture:
            self._rows[bucket] = batch.input_ids.shape[0]
        plan = self._graph_plan(batch)
        if in_capture:
            requests = plan.kv_lens.shape[0]
            buffers = {
                "qo_indptr": self._qo_indptr[: requests + 1],
                "kv_indptr": self._kv_indptr[: requests + 1],
                "kv_indices": self._kv_indices,
                "kv_len_arr": self._kv_lens[:requests],
            }
            self._graphs[bucket] = {scale: self._wrapper(use_cuda_graph=True, **buffers) for scale in self._scales}
            self._graph_parts[bucket] = {
                pair: self._wrapper(use_cuda_graph=True, **of_part.for_mla(requests))
                for pair, of_part in self._of_parts.items()
            }
        self._current, self._current_parts = self._graphs[bucket], self._graph_parts[bucket]
        self._plan_all(plan, batch.forward_mode)
        self._plan_parts(batch, plan)

    def _graph_plan(self, batch: ForwardBatch) -> PagePlan:
        """The plan of a batch, with as many query rows as the graph has.

        The planner gives a request's rows to clusters of two blocks where (rows * heads) / requests is above 64, else
        of one, and the grid that goes with it is frozen into the graph. Ragged modes are captured with all rows of the
        bucket and replayed with fewer: a plan for the other cluster size leaves half of the splits without a block, and
        nothing says so (flashinfer 0.7.2, found by this kit on an H200, in draft-extend v1). A last request that takes
        the rows left over keeps the quotient what it was.
        """
        plan = make_page_plan(self.context, batch)
        if not batch.forward_mode.is_ragged():
            return plan
        return filled_up(plan, self._rows[batch.forward_mode, batch.batch_size], self.context.page_size)

    def _wrapper(self, **graph: Any) -> Any:
        return self._provided.call(self._float_workspace, backend=self.kernel_family, **graph)

    def _plan_all(self, plan: PagePlan, mode: ForwardMode) -> None:
        for scale, wrapper in self._current.items():
            self._plan(wrapper, scale, plan, causal=not mode.is_decode())

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
            lse_mode="base2" if context.kv_parts else "none",
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
        out: torch.Tensor = self._current[layer.scaling].run(query=q, kv_cache=latent, **scales)
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
        part: KVPart,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with the wrapper that was planned for the part's keys, in pages of one."""
        whole = part.kind == "whole"
        latent, scales = self._stored(k, layer, batch, save_kv_cache, self.context.page_size if whole else 1)
        wrapper = self._current[layer.scaling] if whole else self._current_parts[layer.scaling, part]
        out, lse = wrapper.run(query=q, kv_cache=latent, return_lse=True, **scales)
        return out, lse

    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``flashinfer.merge_state``."""
        out, lse = self._merge.call(out_a, lse_a, out_b, lse_b)
        return out, lse

    def _stored(
        self, k: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, save_kv_cache: bool, page_size: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Latent rows in pages of so many slots, with the new ones in them, and the scales of a run."""
        pool = self.context.kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, batch.out_cache_loc, k)
        latent = pool.get_key_buffer(layer.layer_id).view(-1, page_size, layer.head_dim)
        return latent, {"ckv_scale": layer.k_scale, "kpe_scale": layer.k_scale} if pool.dtype.itemsize == 1 else {}


class FlashInferMLAFA3Backend(FlashInferMLABackend):
    """The same through Hopper's kernel, backend fa3."""

    capabilities = FlashInferMLABackend.capabilities.with_changes(requires=Requires(sm=(90, 90), packages=_PACKAGES))
    entry_point = BATCH_MLA_FA3
    kernel_family = "fa3"


class FlashInferMLAFP8Backend(FlashInferMLAFA3Backend):
    """e4m3 latent rows under bf16 queries, which only SM90 has, at the latent width of 512 alone."""

    capabilities = FlashInferMLAFA3Backend.capabilities.with_changes(
        dtypes={"bf16"}, kv_dtypes={"fp8_e4m3"}, head_dims={512}
    )
