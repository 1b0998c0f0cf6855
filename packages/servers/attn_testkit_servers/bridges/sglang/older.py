"""A backend of SGLang 0.5.12.post1 behind the kit's contract: the last release with a draft-extend v1 worker.

Its graph runners called an older pair of hooks, a batch had the pools in it, and v2 reused another ``spec_info``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor import forward_batch_info as fbi
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput, EagleVerifyInput

from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    DraftExtendInput,
    ForwardBatch,
    ForwardMode,
    KVLayer,
    KVPoolSpec,
    LegacyGraphHooks,
    VerifyInput,
)

from . import pools
from .classes import SAME_FIELDS, OfSGLang, of_projection

_MODES = {mode: fbi.ForwardMode[mode.name] for mode in ForwardMode if mode.name in fbi.ForwardMode.__members__}
_KEPT = "sglang"
"""Key of ``ForwardBatch.extras``: one object for all layers."""


def _make_runner(context: BackendContext) -> SimpleNamespace:
    # The settings of `initialize_model_parallel` for one rank.
    parallel_state._ATTN_TP = SimpleNamespace(world_size=1, rank_in_group=0)
    first, window = context.layers[0], context.sliding_window_size
    rows, _ = context.req_to_token.shape
    device = context.device.type
    config = SimpleNamespace(
        attention_arch=AttentionArch.MHA, num_attention_heads=first.tp_q_head_num, head_dim=first.head_dim,
        v_head_dim=first.v_head_dim, swa_v_head_dim=first.v_head_dim, context_len=context.max_context_len,
        get_num_kv_heads=lambda tp_size: first.tp_k_head_num, is_encoder_decoder=False,
    )  # fmt: skip
    return SimpleNamespace(
        device=device, gpu_id=0, model_config=config, sliding_window_size=None if window < 0 else window,
        # A server has no batch of more requests than its table has rows; the kit's table has only those of the case.
        req_to_token_pool=SimpleNamespace(size=max(rows - 1, context.max_bs), req_to_token=context.req_to_token),
        token_to_kv_pool=pools.pool_of(context.kv_pool), token_to_kv_pool_allocator=None, use_mla_backend=False,
        hybrid_gdn_config=None, kimi_linear_config=None, linear_attn_model_spec=None,
        server_args=SimpleNamespace(
            speculative_num_draft_tokens=context.num_draft_tokens, page_size=context.page_size,
            speculative_num_steps=context.speculative_num_steps, triton_attention_num_kv_splits=8,
            disable_cuda_graph=False, chunked_prefill_size=-1, enable_deterministic_inference=False,
            triton_attention_split_tile_size=None,
        ),
    )  # fmt: skip


def _spec_of(mode: ForwardMode, spec: object) -> Any:
    """SGLang's ``spec_info`` over the kit's tensors."""
    if isinstance(spec, VerifyInput):
        return EagleVerifyInput(
            draft_token=spec.draft_token, custom_mask=spec.custom_mask, positions=spec.positions,
            retrieve_index=spec.retrieve_index, retrieve_next_token=spec.retrieve_next_token,
            retrieve_next_sibling=spec.retrieve_next_sibling, retrieve_cum_len=None, spec_steps=spec.spec_steps,
            topk=spec.topk, draft_token_num=spec.draft_token_num, capture_hidden_mode=fbi.CaptureHiddenMode.FULL,
            seq_lens_sum=spec.seq_lens_sum, seq_lens_cpu=spec.seq_lens_cpu,
        )  # fmt: skip
    if isinstance(spec, DraftExtendInput) and mode is ForwardMode.DRAFT_EXTEND_V2:
        return EagleDraftInput(
            hidden_states=spec.hidden_states, num_tokens_per_req=spec.num_tokens_per_req,
            num_correct_drafts=spec.num_correct_drafts, num_accept_tokens=spec.num_accept_tokens,
        )  # fmt: skip
    if isinstance(spec, DraftExtendInput):
        return EagleDraftExtendInput(
            hidden_states=spec.hidden_states, positions=spec.positions, num_correct_drafts=spec.num_correct_drafts,
            num_accept_tokens=spec.num_accept_tokens, num_accept_tokens_cpu=spec.num_accept_tokens_cpu,
        )  # fmt: skip
    return None


class OlderSGLangBackend(LegacyGraphHooks, OfSGLang):
    """An adapter from the kit's contract to an object that SGLang's registry made."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.runner = _make_runner(context)
        self.real: Any = ATTENTION_BACKENDS[self.declared.registered](self.runner)
        """Backend that SGLang's registry made."""
        self.layers = {layer.layer_id: _layer(layer) for layer in context.layers}

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        """SGLang's own pool."""
        return pools.lay_out(spec)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Pass the call on."""
        self.real.init_forward_metadata(self._batch(batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Pass the call on."""
        self.real.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: Any,
    ) -> None:
        """Pass the call on."""
        self.real.init_forward_metadata_capture_cuda_graph(
            bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, _MODES[forward_mode],
            _spec_of(forward_mode, spec_info),
        )  # fmt: skip

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int | None,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: Any,
        seq_lens_cpu: torch.Tensor | None,
    ) -> None:
        """Pass the call on."""
        self.real.init_forward_metadata_replay_cuda_graph(
            bs, req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, _MODES[forward_mode],
            _spec_of(forward_mode, spec_info), seq_lens_cpu,
        )  # fmt: skip

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Value of SGLang's backend."""
        return int(self.real.get_cuda_graph_seq_len_fill_value())

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Pass the call on, as SGLang's models do."""
        given = {} if layer.sinks is None else {"sinks": layer.sinks}
        given_k, given_v = (k, v) if save_kv_cache else (None, None)
        q, *new = of_projection(q, given_k, given_v, layer)
        out: torch.Tensor = self.real.forward(
            q, *new, self.layers[layer.layer_id], self._batch(batch), save_kv_cache=save_kv_cache, **given
        )
        return out

    def _batch(self, batch: ForwardBatch) -> Any:
        if _KEPT not in batch.extras:
            batch.extras[_KEPT] = fbi.ForwardBatch(
                forward_mode=_MODES[batch.forward_mode], spec_info=_spec_of(batch.forward_mode, batch.spec_info),
                req_to_token_pool=self.runner.req_to_token_pool, token_to_kv_pool=self.runner.token_to_kv_pool,
                attn_backend=self.real, **{name: getattr(batch, name) for name in SAME_FIELDS},
            )  # fmt: skip
        return batch.extras[_KEPT]


def _layer(layer: AttentionLayer) -> Any:
    return RadixAttention(
        layer.tp_q_head_num, layer.head_dim, layer.scaling, layer.tp_k_head_num, layer.layer_id,
        logit_cap=layer.logit_cap, sliding_window_size=layer.sliding_window_size,
    )  # fmt: skip
