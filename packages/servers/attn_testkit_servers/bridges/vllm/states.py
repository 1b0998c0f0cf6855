"""vLLM's backends of layers with a recurrent state behind the kit's contract: builders, metadata and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config.mamba import MambaConfig
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridAttnMetadata

from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    KVLayer,
    KVPoolSpec,
    StateBackend,
    StateLayer,
)

from ..rows import of_softmax_layer
from . import pools
from .config import make_config
from .driver import VLLMBackend
from .groups import make_groups
from .inputs import Inputs, Step, common_arguments
from .layers import make_layers, name_of
from .numbers import width_of
from .state_layers import KINDS, MAMBA_CHUNK, make_state_layers

_KEPT, _SOFTMAX = "vllm", AttentionBackendEnum.TRITON_ATTN
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Counts(MambaHybridAttnMetadata):  # type: ignore[misc]
    """Acceptance counts for every builder that accepts them, like in model runner V1.

    ``MambaHybridModelState`` of V2 leaves ``BailingLinearAttentionMetadataBuilder`` out
    (docs/evidence/findings.md).
    """

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        """Arguments of a builder, with the counts of accepted tokens if it takes them."""
        if not getattr(attn_metadata_builder, "supports_spec_decode_metadata", False):
            found: dict[str, Any] = super().get_extra_attn_kwargs(attn_metadata_builder, num_reqs)
            return found
        if self.num_accepted_tokens is None:
            return {}
        return {"num_accepted_tokens": self.num_accepted_tokens[:num_reqs]}


class VLLMStateBackend(VLLMBackend, StateBackend):
    """Layers of ``MambaBase`` and their builders, as ``MambaHybridModelState`` prepares each step for them.

    Softmax layers between them, if a case has some, are ``TRITON_ATTN``'s, in KV cache groups of their own.
    """

    counts: ClassVar[type[MambaHybridAttnMetadata]] = Counts
    """Class of the object that gives builders the acceptance counts."""

    def __init__(self, context: BackendContext) -> None:
        StateBackend.__init__(self, context)
        assert context.state is not None
        softmax = tuple(layer for layer in context.layers if not isinstance(layer, StateLayer))
        blocks = max(group.kv_pool.num_slots // context.page_size for group in context.groups)
        kind = self.declared.state_layer
        self.real = of_softmax = _SOFTMAX.get_class()
        self.config = _with_states(
            make_config(self.declared, context, blocks, pools.layout_of(of_softmax).name), context
        )
        self.layers = make_state_layers(kind, self.config, context.state)
        self.layers |= make_layers(
            of_softmax, self.config, replace(context, layers=softmax), self.declared.capabilities
        )
        self.groups = make_groups(self.config, context, self.layers, blocks)
        self.kind = KINDS[kind]
        initialize_mamba_ssu_backend(self.config.mamba_config, self.groups.config)
        self.inputs = Inputs(context, self.groups.of_kit)
        self.of_states = [
            index for index, group in enumerate(self.groups.config.kv_cache_groups)
            if group.layer_names[0] in {name_of(layer) for layer in context.state.layers}
        ]  # fmt: skip
        self.state_blocks = context.state.req_to_state.new_zeros(context.max_bs, 1 + self.config.num_speculative_tokens)

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        """vLLM's own views, of the softmax layers."""
        return pools.lay_out(_SOFTMAX.get_class(), spec)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Fill the buffers and build."""
        batch.extras[_KEPT] = self._prepare(batch, self.inputs.fill(batch, replay=False))

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Build for the warm-ups of a capture; at a replay fill the buffers, and build metadata that are discarded."""
        if in_capture:
            batch.extras[_KEPT] = self._build_for_capture(batch)
            return
        self._prepare(batch, self.inputs.fill(batch, replay=True))

    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Call the layer's core on rows that a projection would give. Of a softmax layer the three are q, k and v."""
        if not isinstance(layer, StateLayer):
            return super().forward(*of_softmax_layer(mixed, a, b), layer, batch)
        with override_forward_context(self._forward_context(batch, len(mixed))):
            out = self.kind.forward(self.layers[name_of(layer)], (mixed, a, b), layer)
        return out.view(len(mixed), layer.v_heads, layer.v_dim)

    def _prepare(self, batch: ForwardBatch, step: Step) -> dict[str, Any]:
        """Fill in the states of a step, and build metadata, as ``prepare_attn`` does. A step without a live request has
        no states."""
        state, bs = batch.state, batch.batch_size
        assert state is not None
        live = int((step.query_start_loc[: bs + 1].diff() > 0).sum())
        self.state_blocks.zero_()
        blocks = state.indices.view(bs, -1) if bs else state.indices.view(0, 1)
        self.state_blocks[:bs, : blocks.shape[1]].copy_(blocks.clamp(min=0))
        prefills = torch.zeros(bs, dtype=torch.bool)
        if batch.forward_mode is ForwardMode.EXTEND:
            prefills[:live] = True
        accepted = drafts = None
        if state.num_accepted is not None:
            accepted = state.num_accepted.new_ones(bs)
            accepted[:live] = state.num_accepted[:live]
            drafts = torch.full((bs,), -1, dtype=torch.int32)
            drafts[:live] = width_of(self.context, batch.forward_mode) - 1
        return self._build(step, self.counts(prefills, accepted, drafts))

    def _build_for_capture(self, batch: ForwardBatch) -> dict[str, Any]:
        self.state_blocks.zero_()
        bs, rows = batch.batch_size, batch.input_ids.shape[0]
        step = self.inputs.dummy(batch.forward_mode, bs, rows)
        return self._build(step, self.counts(torch.zeros(bs, dtype=torch.bool)))

    def _build(self, step: Step, states: MambaHybridAttnMetadata | None = None) -> dict[str, Any]:
        arguments = common_arguments(self.inputs, step)
        for index in self.of_states:
            arguments["block_tables"][index] = self.state_blocks[: step.num_reqs]
        built: dict[str, Any] = build_attn_metadata(
            attn_groups=self.groups.builders, kv_cache_config=self.groups.config, causal=True,
            model_specific_attn_metadata=states, **arguments,
        )  # fmt: skip
        return built

    def _forward_context(self, batch: ForwardBatch, rows: int) -> ForwardContext:
        slots = build_slot_mappings_by_layer(self.inputs.slot_mappings[:, :rows], self.groups.config)
        return ForwardContext(self.layers, batch.extras[_KEPT], slots)


def _with_states(config: Any, context: BackendContext) -> Any:
    """The configuration, with the values that layers of states and their builders read."""
    assert context.state is not None
    first, verifies = context.state.layers[0], context.state.rollback == "slots"
    cache, model = config.cache_config, config.model_config
    cache.mamba_block_size, cache.mamba_ssm_cache_dtype = context.max_context_len, _DTYPES[context.state.pool.dtype]
    if first.conv_width == 1:
        cache.mamba_cache_dtype = _DTYPES[context.state.pool.dtype]
    config.mamba_config = MambaConfig()
    # Otherwise FlashInfer's kernel runs prefills on an SM90.
    config.additional_config = {"gdn_prefill_backend": "triton"}
    model.get_mamba_chunk_size = lambda: MAMBA_CHUNK
    model.hf_text_config.linear_key_head_dim = first.k_dim
    model.hf_text_config.linear_value_head_dim = first.v_dim
    config.num_hash_lookahead_tokens = 0
    assert verifies or not config.num_speculative_tokens, "drafts are verified by slots"
    if config.speculative_config is not None:
        config.speculative_config.use_eagle_block_drop = lambda: False
    return config
