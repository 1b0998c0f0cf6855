"""SGLang's backends of layers with a recurrent state, in its hybrid wrapper, behind the kit's contract."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, attn_backend_wrapper

from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    StateBackend,
    StateInput,
    StateLayer,
)
from cuda_on_cpu import scratch

from ..rows import of_softmax_layer
from .current import SGLangBackend, capturing, made_layer
from .runner import make_runner, publish
from .state_layers import KINDS
from .state_pools import config_of, has_turned_windows, kv_pool, request_pool, softmax_of


class SGLangStateBackend(SGLangBackend, StateBackend):
    """``HybridLinearAttnBackend`` around the backend of the linear layers, as ``attn_backend_wrapper`` makes it.

    SGLang serves no model without softmax layers. If a case has none, the bridge adds one after the kit's layers. Its
    backend plans every batch, but no forward calls it.
    """

    def __init__(self, context: BackendContext) -> None:
        StateBackend.__init__(self, context)
        assert context.state is not None
        publish(self.declared, context)
        softmax = softmax_of(context)
        config = config_of(context.state, [layer.layer_id for layer in softmax], context.attn_tp_size)
        requests = request_pool(context, context.state, config, context.topk)
        pool = kv_pool(context, softmax, requests.mamba_pool)
        self.runner = make_runner(self.declared, replace(context, layers=tuple(softmax)), softmax[0].scaling, pool)
        self.runner.model_config.hf_config = self.runner.model_config.hf_text_config = config
        self.runner.req_to_token_pool = requests
        self.has_turned_windows = has_turned_windows(context.state)
        self.states = requests.mamba_pool
        self.real = attn_backend_wrapper(self.runner, ATTENTION_BACKENDS[self.declared.registered](self.runner))
        self.reals, self.draft = {softmax[0].scaling: self.real}, None
        self.layers = {layer.layer_id: made_layer(layer, context.kv_pool.dtype) for layer in softmax}
        self.shared: weakref.ref[torch.Tensor] | None = None
        """Addresses for which programs may race."""
        self.kind = KINDS[context.state.layers[0].kind]
        self.linear_layers = {layer.layer_id: self.kind.make(layer) for layer in context.state.layers}
        for layer in context.state.layers:
            self.kind.prepare(self.real, layer)

    def replayed(self, view: ForwardBatch) -> Any:
        """The view of a replay, with a request table row of 0 for padded requests, as SGLang's graph runners leave it
        (``cuda_graph_buffer_registry.py``). The backend writes zeros there, too, but the kit allows no writes.
        """
        made = super().replayed(view)
        made.req_pool_indices = view.req_pool_indices.clone()
        made.req_pool_indices[view.batch_size - view.num_padding :] = 0
        return made

    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Pass the call on, as SGLang's models do, with contiguous tensors. For a softmax layer the three are q, k and
        v."""
        if not isinstance(layer, StateLayer):
            return super().forward(*of_softmax_layer(mixed, a, b), layer, batch)
        given = mixed.contiguous(), None if a is None else a.contiguous(), None if b is None else b.contiguous()
        self._share_parents()
        with capturing(batch):
            out = self.kind.forward(self.real, self.linear_layers[layer.layer_id], given, layer, self._plan(batch))
        return out.reshape(len(mixed), layer.v_heads, layer.v_dim)

    def _share_parents(self) -> None:
        """Let programs race for the parents of nodes: each program of ``causal_conv1d_update`` computes them from the
        links, and stores its present result after each token. All programs store the same final values, and none reads
        them.
        """
        parents = self.real.linear_attn_backend.forward_metadata.retrieve_parent_token
        # By the tensor, not by its address: each eager plan makes one, often where another mode's lay before.
        if parents is not None and (self.shared is None or self.shared() is not parents):
            self.shared = weakref.ref(parents)
            scratch(parents)

    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        """Pass the call on to the wrapper, as ``commit_mamba_states_after_verify`` does."""
        with self._windows_in_one_piece():
            self.real.update_mamba_state_after_mtp_verify(
                last_correct_step_indices=steps.long(), mamba_track_indices=None, mamba_steps_to_track=None,
                model=self.runner.model,
            )  # fmt: skip

    @contextlib.contextmanager
    def _windows_in_one_piece(self) -> Iterator[None]:
        """Give SGLang a contiguous copy of turned windows, and copy it back: a commit refuses strided ones."""
        pool = self.runner.req_to_token_pool.mamba_pool
        held = pool.mamba_cache
        if held.conv[0].is_contiguous() or not self.has_turned_windows:
            yield
            return
        pool.mamba_cache = replace(held, conv=[held.conv[0].contiguous()])
        yield
        held.conv[0].copy_(pool.mamba_cache.conv[0])
        pool.mamba_cache = held
