"""A backend of vLLM 0.33.0 behind the kit's contract: each hook does what vLLM's model runner does at that point."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar

import torch
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention.attention import unified_attention_with_output, unified_kv_cache_update
from vllm.utils import torch_utils
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    HandOver,
    KVLayer,
    KVPoolSpec,
    KVSplit,
)

from ..rows import as_projected
from . import pools
from .capabilities import BridgeCapabilities
from .config import make_config
from .groups import make_groups
from .inputs import Inputs, Step, common_arguments
from .layers import make_layers, name_of
from .ranks import without_empty_rows

_KEPT = "vllm"
"""Key of ``ForwardBatch.extras``: layer name -> metadata, which all forwards of the batch get."""


class VLLMBackend(AttentionBackend):
    """An adapter from the kit's contract to a class of vLLM's registry, its builders and implementations."""

    declared: ClassVar[BridgeCapabilities]
    real: Any
    """Class of vLLM's registry."""
    receiver: Any = None
    """Workers of the last hand-over."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        blocks = max(group.kv_pool.num_slots // context.page_size for group in context.groups)
        self.config = make_config(self.declared, context, blocks, pools.layout_of(self.real, self.declared.layout).name)
        self.layers = make_layers(self.real, self.config, context, self.declared.capabilities)
        self.groups = make_groups(self.config, context, self.layers, blocks)
        self.inputs = Inputs(context, self.groups.of_kit)

    def receive(self, handed: HandOver) -> None:
        """Let vLLM's workers of both servers hand the requests over."""
        from .hand_over import Receiver

        if self.receiver is None or self.receiver.senders is not handed.senders:
            self.receiver = Receiver(self.context, self.config, self.layers, self.groups, handed)
        self.receiver.receive(handed)

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        """vLLM's own views."""
        return pools.lay_out(cls.real, spec, cls.declared.layout)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Fill the buffers and build."""
        batch.extras[_KEPT] = self._build(self.inputs.fill(batch, replay=False))

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Build for the warm-ups of a capture; at a replay fill the buffers, and build metadata that are discarded."""
        if in_capture:
            batch.extras[_KEPT] = self._build_for_capture(batch)
            return
        step = self.inputs.fill(batch, replay=True)
        # A draft's graph has its builders' work inside: nothing is built for a replay of it.
        if batch.forward_mode is not ForwardMode.DRAFT_DECODE:
            self._build(step)

    def init_forward_metadata_before_capture(self, batch: ForwardBatch) -> None:
        """Build once more: "Capture with fresh attention state"."""
        batch.extras[_KEPT] = self._build_for_capture(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Advance the inputs between forwards of a draft's fused loop; nothing in other modes."""
        if batch.forward_mode is ForwardMode.DRAFT_DECODE:
            self.inputs.advance(batch)
            metadata = batch.extras[_KEPT]
            for groups in self.groups.builders:
                for group in groups:
                    group.update_draft_decode_metadata(metadata)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend like ``Attention.forward``: the caller makes the output, and keys and values are stored first.

        Models give it rows of a projection, [T, heads * dim], and it makes views of them.
        """
        name, of_vllm = name_of(layer), self.layers[name_of(layer)]
        output = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim) if out is None else out
        query = as_projected(q)
        if of_vllm.query_quant is not None:
            query, _ = of_vllm.query_quant(query, of_vllm._q_scale)
        q = query.view(-1, of_vllm.num_heads, of_vllm.head_size)
        if k is not None:
            k = as_projected(k).view(-1, of_vllm.num_kv_heads, of_vllm.head_size)
            v = as_projected(v).view(-1, of_vllm.num_kv_heads, of_vllm.head_size_v)
        with override_forward_context(self._forward_context(batch, q.shape[0])):
            if save_kv_cache and not self.real.forward_includes_kv_cache_update:
                unified_kv_cache_update(k, v, name)
            unified_attention_with_output(q, k, v, output, name)
        return output

    def _forward_context(self, batch: ForwardBatch, rows: int) -> ForwardContext:
        slots = build_slot_mappings_by_layer(self.inputs.slot_mappings[:, :rows], self.groups.config)
        return ForwardContext(self.layers, batch.extras[_KEPT], slots)

    def _build_for_capture(self, batch: ForwardBatch) -> dict[str, Any]:
        rows = batch.input_ids.shape[0]
        return self._build(self.inputs.dummy(batch.forward_mode, batch.batch_size, rows))

    def _build(self, step: Step) -> dict[str, Any]:
        built: dict[str, Any] = build_attn_metadata(
            attn_groups=self.groups.builders, kv_cache_config=self.groups.config, causal=self.context.causal,
            **common_arguments(self.inputs, step),
        )  # fmt: skip
        if step.spans:
            self._clear_spans(built)
        return built

    def _clear_spans(self, built: dict[str, Any]) -> None:
        """Clear the ranges of layers without spans, as Gemma 4 does (``_clear_mm_prefix_for_full_attn_layers``)."""
        kept = {id(built[name_of(layer)]) for layer in self.context.layers if layer.bidirectional_spans}
        for layer in self.context.layers:
            if not layer.bidirectional_spans:
                # In place, because mask functions of FlexAttention read the object; a copy if others share it.
                metadata = built[name_of(layer)]
                built[name_of(layer)] = metadata = copy(metadata) if id(metadata) in kept else metadata
                metadata.mm_prefix_range = metadata.mm_prefix_range_tensor = None


class VLLMLatentBackend(VLLMBackend):
    """MLA: the decode part of ``MLAAttention.forward_impl``, whose inputs have the kit's absorbed form."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        out: torch.Tensor | None = None,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the latent rows, and attend to them with ``forward_mqa``."""
        if selected is not None:
            self.layers[name_of(layer)].selected[: len(selected)].copy_(selected)
        found, _ = self._attend(q, k, layer, batch, save_kv_cache)
        output = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim) if out is None else out
        output[: found.shape[0]] = found
        return output

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
        """Output and log-sum-exp of ``forward_mqa`` over all keys, or over those of a rank of decode context
        parallelism, as vLLM merges them."""
        found = self._attend(q, k, layer, batch, save_kv_cache)
        metadata: Any = batch.extras[_KEPT]
        return without_empty_rows(*found, metadata[name_of(layer)]) if part.own_pool else found

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, save_kv_cache: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rank, name = layer.kv_lora_rank, name_of(layer)
        of_vllm = self.layers[name]
        context = self._forward_context(batch, q.shape[0])
        metadata, cache = context.attn_metadata[name], of_vllm.kv_cache
        kv_dtype = of_vllm.kv_cache_dtype
        if save_kv_cache:
            unscaled = kv_dtype == "fp8" and of_vllm._k_scale_float == 1.0
            of_vllm.impl.do_kv_cache_update(
                k[:, 0, :rank].contiguous(),
                k[..., rank:],
                cache,
                context.slot_mapping[name],
                kv_dtype,
                of_vllm._k_scale,
                unscaled,
            )
        if kv_dtype != "auto":
            cache = cache.view(torch.float8_e4m3fn)
        # Rows of prefills go through ``forward_mqa``, too, if their keys are selected (``sparse_mla_force_mqa``).
        rows = q[: metadata.num_actual_tokens if layer.topk else metadata.num_decode_tokens]
        query: Any = (rows[..., :rank], rows[..., rank:])
        if of_vllm.quantized_queries is not None and of_vllm.impl.supports_quant_query_input:
            query = of_vllm.quantized_queries(*query, of_vllm._q_scale)
        # vLLM replaces ``torch.cuda.set_stream`` to know the current stream, which the kit sets without it.
        torch_utils._current_stream_tls.value = torch.cuda.current_stream()
        with override_forward_context(context):
            found: tuple[torch.Tensor, torch.Tensor] = of_vllm.impl.forward_mqa(query, cache, metadata, of_vllm)
        return found
