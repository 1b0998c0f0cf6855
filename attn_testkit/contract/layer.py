"""One attention layer of the model, as a backend sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from .head_layout import OfHeadLayout

__all__ = ["AttentionLayer", "HeadShape"]


class HeadShape(NamedTuple):
    """Numbers and width of a layer's heads on this rank; plans, strides and workspaces depend on them."""

    num_qo_heads: int
    """Query heads on this rank."""
    num_kv_heads: int
    """KV heads on this rank."""
    head_dim: int
    """Width of a query and key row."""


@dataclass(frozen=True)
class AttentionLayer(OfHeadLayout):
    """The attributes of one attention layer, under the names that servers use.

    The layers of a test model differ (scale, window, soft cap), so a backend must not reuse one layer's values for the
    next. With the capability ``heads_by_layer`` they differ in head counts and head dims as well.
    """

    layer_id: int
    """Ids are consecutive and need not begin at 0: a later pipeline rank has the later layers of a model."""
    tp_q_head_num: int
    """Query heads on this rank."""
    tp_k_head_num: int
    """KV heads on this rank; for MLA 1."""
    head_dim: int
    """Width of a query and key row. For MLA (absorbed form): ``kv_lora_rank + rope``."""
    v_head_dim: int
    """Width of a value and output row: ``head_dim``, or less with ``HeadShapes.wider_keys``. For MLA:
    ``kv_lora_rank``, the first part of the latent key."""
    scaling: float
    """Factor on q·k before the softmax. Never assume 1/sqrt(head_dim): models differ, and MLA always does. A kernel
    that supports only that declares it: ``LayerOptions.any_scaling``."""
    sliding_window_size: int = -1
    """W: a row at position p sees keys p-W .. p, that is W+1 keys. -1: no window."""
    non_causal_window: str = "left"
    """Keys that a window of W leaves to a row at position p if ``causal`` is False. ``left``: keys from p - W on, and
    all later ones (``window_size=(W, -1)`` of FlashAttention). ``block``: keys from W before the request's first row of
    the step on, for all its rows (SGLang's FlashInfer class). ``both``: keys p - W .. p + W (``window_size=(W, W)``;
    encoders, and DFlash drafts of vLLM). Causal layers have ``left``."""
    attention_chunk_size: int = 0
    """Positions of a chunk in chunked-local layers (Llama 4): a row at position p sees keys p // C * C .. p, and C is a
    multiple of the page size. 0: the layer is not chunked. Such a layer has no window."""
    logit_cap: float = 0.0
    """Soft cap: logits become cap * tanh(logits / cap), after scaling and before masking. 0: none."""
    k_scale: float = 1.0
    """The KV pool holds K / k_scale when its dtype is FP8, or rows of a format with a scale per layer; 1.0 otherwise.
    With ``ServerConventions.takes_unused_scales`` it may come from a checkpoint although the pool holds K unscaled."""
    v_scale: float = 1.0
    """``k_scale`` of V."""
    q_scale: float = 1.0
    """A checkpoint's scale of queries (vLLM: ``_q_scale``), which ``Precision.q_scale="static"`` divides them by before
    they are rounded to FP8. With other words, and over a pool of the model's dtype, nothing is divided or multiplied by
    it."""
    k_head_scales: torch.Tensor | None = field(default=None, compare=False)
    """[tp_k_head_num] float32 on the device, of rows of format ``fp8_per_head``: the pool holds K / k_head_scales. The
    server changes it in place between steps, so a graph has to read it from there. None: there is one scale."""
    v_head_scales: torch.Tensor | None = field(default=None, compare=False)
    """``k_head_scales`` of V."""
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """[tp_q_head_num] float32 on the device: one more logit per head, which gets weight but adds no value."""
    alibi_slopes: torch.Tensor | None = field(default=None, compare=False)
    """[tp_q_head_num] float32 on the device: the logit of a row at position p and a key at position j has ``slope *
    (j - p)`` added, after scaling and before masking. None: no ALiBi. Such a layer has no soft cap and no sinks, which
    servers apply before it or after."""
    kv_sharing_target_layer_id: int = -1
    """Id of an earlier layer whose keys and values the layer reads (vLLM: ``kv_sharing_target_layer_name``). Its
    ``forward`` gets ``save_kv_cache=False``, and k and v are NaN. ``KVPool`` returns the memory of the earlier
    layer for both ids. -1: the layer stores its own."""
    causal: bool = True
    """True: a row sees the step's rows up to its own. False: it sees all keys of its request, later rows of the step
    included, as in draft blocks (DFlash) and encoders. Then there is no tree, and a window only with the declaration
    ``Windows.non_causal``. The value is the same in all layers of a model but the cross-attention layers, which are
    never causal."""
    is_cross_attention: bool = False
    """True: a row sees the ``ForwardBatch.encoder_lens`` keys of its request's encoder and no other, as
    ``CrossAttention`` says."""
    encoder_only: bool = False
    """True: a row sees the rows of its own sequence in the step, and no pool is read or written, as ``EncoderOnly``
    says. Then ``causal`` is False."""
    encoder_window: int = 0
    """Most rows of a window of an encoder-only layer whose rows see only their own window
    (``ForwardBatch.cu_window_seqlens``). 0: a row sees its whole sequence."""
    bidirectional_spans: bool = False
    """True: rows of a span of ``ForwardBatch.mm_prefix_range`` see each other in both directions in this layer. False:
    the layer is causal, whatever spans the batch has. Layers differ only with ``Spans.by_layer``."""
    topk: int = 0
    """Keys that each row selects at most, and the width of ``selected``. 0: rows attend to all visible keys."""
    selects_per_kv_head: bool = False
    """True if each KV head selects for itself, so that ``selected`` is [T, Hk, topk] (``Sparse.per_kv_head``)."""
    index_heads: int = 0
    """Query heads of the layer's indexer. 0: selections are given."""
    reuses_selection: bool = False
    """True if the layer attends to the keys that the last layer before it which selects has selected. Such a layer has
    no index keys."""
    kv_lora_rank: int = 0
    """MLA: width of the latent part of a key. 0: this layer is not MLA."""
    family: str = "softmax"
    """Name of the layer's family. Families other than ``softmax`` have their own head layouts."""

    def to(self, device: torch.device) -> AttentionLayer:
        """The layer with its tensors on a device. Scales of heads, which change there, are copied."""
        moved = {
            name: each.to(device, copy=name.endswith("head_scales"))
            for name in ("sinks", "alibi_slopes", "k_head_scales", "v_head_scales")
            if (each := getattr(self, name)) is not None
        }
        return replace(self, **moved) if moved else self

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of elements of a row's inputs, if these are not q, k and v of ``head_shape``: see ``StateLayer``."""
        return ()

    @property
    def head_shape(self) -> HeadShape:
        """Head counts and width, which are equal for layers that share a plan."""
        return HeadShape(self.tp_q_head_num, self.tp_k_head_num, self.head_dim)

    @property
    def selected_shape(self) -> tuple[int, ...]:
        """Shape of a row of ``selected``: (topk,), or (Hk, topk)."""
        return (self.tp_k_head_num, self.topk) if self.selects_per_kv_head else (self.topk,)

    @property
    def tp_v_head_num(self) -> int:
        """Value heads on this rank: as many as key heads."""
        return self.tp_k_head_num

    @property
    def qk_head_dim(self) -> int:
        """Another name of servers for ``head_dim``."""
        return self.head_dim

    @property
    def has_usual_scaling(self) -> bool:
        """True if ``scaling`` is 1/sqrt(head_dim), apart from rounding."""
        return math.isclose(self.scaling * self.head_dim**0.5, 1.0, rel_tol=1e-6)

    @property
    def q_per_kv(self) -> int:
        """Query heads that share a KV head (the GQA ratio)."""
        return self.tp_q_head_num // self.tp_k_head_num
