"""A backend of SGLang 0.5.23 behind the kit's contract: hooks to hooks of the same name."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    DraftDecodeInput,
    ForwardBatch,
    ForwardMode,
    HandOver,
    KVLayer,
    KVPoolSpec,
    Transfer,
    TreeMaskMode,
    VerifyMask,
)

from . import pools
from .batches import captured_batch, eager_batch, replay_view
from .classes import OfSGLang, of_projection
from .runner import make_runner


@dataclass
class _Kept:
    """SGLang's batches for a batch of the kit, stored with it: all layers get the same object."""

    captured: bool
    planned: Any = None
    forward_of: weakref.ref[ForwardBatch] | None = None
    forward: Any = None
    """Batch of the present forward of a draft."""


class SGLangBackend(OfSGLang):
    """An adapter from the kit's contract to an object that SGLang's registry made."""

    states: Any = None
    """SGLang's pool of states; None if no layer has a state."""
    receiver: Any = None
    """Servers of the last hand-over."""
    hicache: Any = None
    """SGLang's cache of host memory; None before the first page leaves."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if (planner := sys.modules.get("sglang.srt.layers.attention.flashinfer_backend")) is not None:
            # A plan that raised leaves it set. A server ends then, and a new one has a new module.
            planner.global_override_indptr_cpu = None  # type: ignore[attr-defined]
        scales = {layer.scaling for layer in context.layers} if self.declared.one_scale else {context.layers[0].scaling}
        runners = {scale: make_runner(self.declared, context, scale) for scale in sorted(scales)}
        self.runner = next(iter(runners.values()))
        self.real: Any = None
        """Backend that SGLang's registry made."""
        self.reals: dict[float, Any] = {}
        """Softmax scale -> backend, if each scale has its own."""
        self.draft: Any = None
        """Backend for draft-decode: a draft worker has a multi-step backend in addition to the other one."""
        if context.modes - {ForwardMode.DRAFT_DECODE}:
            self.reals = {scale: ATTENTION_BACKENDS[self.declared.registered](each) for scale, each in runners.items()}
            self.real = next(iter(self.reals.values()))
        if ForwardMode.DRAFT_DECODE in context.modes:
            branches, steps = context.draft_branches, context.speculative_num_steps
            self.draft = DraftBackendFactory(self.runner, branches, steps).create_decode_backend()
        self.layers = {layer.layer_id: made_layer(layer, context.kv_pool.dtype) for layer in context.layers}

    def receive(self, handed: HandOver) -> None:
        """Let SGLang's managers of both servers hand the requests over."""
        from .hand_over import Receiver

        if self.receiver is None or self.receiver.senders is not handed.senders:
            self.receiver = Receiver(self.context, self.runner.token_to_kv_pool, self.states, handed)
        self.receiver.receive(handed)

    def offload(self, transfer: Transfer) -> torch.cuda.Event | None:
        """Pass the pages on to HiCache."""
        from .hicache import HiCache

        if self.hicache is None:
            self.hicache = HiCache(self.context, self.runner.token_to_kv_pool, transfer.host.keys[0], transfer.stream)
        event: torch.cuda.Event | None = self.hicache.offload(transfer)
        return event

    def reload(self, transfer: Transfer) -> torch.cuda.Event | None:
        """Pass the pages on to HiCache, from which they left."""
        event: torch.cuda.Event | None = self.hicache.reload(transfer)
        return event

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        """SGLang's own pool."""
        return pools.lay_out(spec)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Pass the call on."""
        for each in self._planned_by(batch):
            each.init_forward_metadata(self._plan(batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Pass the call on."""
        for each in (*self.reals.values(), *([] if self.draft is None else [self.draft])):
            each.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Pass on one of SGLang's batches, or at a replay the view that its graph runners make."""
        if not in_capture:
            # Nothing of a view is kept: it is gone when the graph has run.
            for each in self._planned_by(batch):
                each.init_forward_metadata_out_graph(self.replayed(batch))
            return
        batch.extras[_KEPT] = _Kept(captured=True)
        with capturing(batch):
            for each in self._planned_by(batch):
                each.init_forward_metadata_out_graph(self._plan(batch), in_capture=True)

    def init_forward_metadata_before_capture(self, batch: ForwardBatch) -> None:
        """SGLang's hook, which has another name."""
        for each in self._planned_by(batch):
            if hasattr(each, "on_after_cuda_graph_warmup"):
                each.on_after_cuda_graph_warmup()

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Pass the call on. A draft is planned as a whole, so there is nothing to plan in its steps."""
        if not isinstance(batch.spec_info, DraftDecodeInput):
            with capturing(batch):
                for each in self._planned_by(batch):
                    each.init_forward_metadata_in_graph(self._plan(batch))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Value of SGLang's backend."""
        first = self.draft.attn_backends[0] if self.real is None else self.real
        return int(first.get_cuda_graph_seq_len_fill_value())

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The backend's own buffer, if it has one."""
        own = None if self.real is None else self.real.verify_mask
        return own and VerifyMask(own.buffer, TreeMaskMode(int(own.mode)), own.max_bs, own.is_read)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pass the call on, as ``RadixAttention.forward`` does for SGLang's models."""
        spec = batch.spec_info
        if isinstance(spec, DraftDecodeInput):
            real = self.draft.attn_backends[spec.step]
        else:
            real = self.reals.get(layer.scaling, self.real)
        given: dict[str, Any] = {} if layer.sinks is None else {"sinks": layer.sinks}
        new_k, new_v = (k, v) if save_kv_cache else self._stored(layer, batch)
        if not layer.is_mla:
            q, new_k, new_v = of_projection(q, new_k, new_v, layer)
        if self.declared.rope_apart:
            rank = layer.kv_lora_rank
            given["q_rope"], given["k_rope"] = q[..., rank:], None if new_k is None else new_k[..., rank:]
            q, new_k = q[..., :rank], None if new_k is None else new_k[..., :rank]
        if selected is not None:
            given["topk_indices"] = selected
        with capturing(batch):
            out: torch.Tensor = real.forward(
                q, new_k, new_v, self.layers[layer.layer_id], self._forward(batch), save_kv_cache=save_kv_cache, **given
            )
        return out

    def _stored(self, layer: AttentionLayer, batch: ForwardBatch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """k and v of rows that the pool holds already."""
        if self.declared.reads_back:
            return None, None
        keys, values = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        return keys[batch.out_cache_loc], values[batch.out_cache_loc]

    @property
    def _width(self) -> int:
        """Rows per request in verify and draft-extend v2."""
        return self.context.num_draft_tokens

    def replayed(self, view: ForwardBatch) -> Any:
        """The view that SGLang's graph runners make for a replay."""
        return replay_view(view, self._width, self.runner)

    def _planned_by(self, batch: ForwardBatch) -> list[Any]:
        return [self.draft] if batch.forward_mode.is_draft_decode() else list(self.reals.values())

    def _plan(self, batch: ForwardBatch) -> Any:
        """SGLang's batch for a batch that is planned, made once."""
        kept = batch.extras.setdefault(_KEPT, _Kept(captured=False))
        assert isinstance(kept, _Kept)
        if kept.planned is None:
            make = captured_batch if kept.captured else eager_batch
            kept.planned = make(batch, self._width, self.runner)
        return kept.planned

    def _forward(self, batch: ForwardBatch) -> Any:
        """SGLang's batch for a forward: the planned one, except in a draft, whose forwards have their own slots."""
        if not isinstance(batch.spec_info, DraftDecodeInput):
            return self._plan(batch)
        kept = batch.extras[_KEPT]
        assert isinstance(kept, _Kept)
        if kept.forward_of is None or kept.forward_of() is not batch:
            make = captured_batch if kept.captured else eager_batch
            kept.forward, kept.forward_of = make(batch, self._width, self.runner, forward=True), weakref.ref(batch)
        return kept.forward


_KEPT = "sglang"
"""Key of ``ForwardBatch.extras``."""


@contextlib.contextmanager
def capturing(batch: ForwardBatch) -> Iterator[None]:
    """SGLang's flag of the process, which its graph runners set from the first warm-up to the end of a capture."""
    kept, before = batch.extras.get(_KEPT), capture_mode.is_capture_mode
    capture_mode.is_capture_mode = isinstance(kept, _Kept) and kept.captured
    try:
        yield
    finally:
        capture_mode.is_capture_mode = before


def made_layer(layer: AttentionLayer, kv_dtype: torch.dtype) -> Any:
    """SGLang's layer for a layer of the kit."""
    made = RadixAttention(
        layer.tp_q_head_num, layer.head_dim, layer.scaling, layer.tp_k_head_num, layer.layer_id,
        logit_cap=layer.logit_cap, v_head_dim=layer.v_head_dim, sliding_window_size=layer.sliding_window_size,
    )  # fmt: skip
    if kv_dtype.itemsize == 1 or layer.k_scale != 1.0 or layer.v_scale != 1.0:
        made.k_scale, made.v_scale = torch.tensor(layer.k_scale), torch.tensor(layer.v_scale)
        made.k_scale_float, made.v_scale_float = layer.k_scale, layer.v_scale
    return made
