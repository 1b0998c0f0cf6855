"""Class L: wrappers, capabilities and the contract of hooks, inputs and outputs."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    Unsupported,
    VerifyInput,
)

from .catalogue import fault
from .dense import DenseBackend, Visibility
from .parent import Metadata, PlannedBackend

_ALL = tuple(ForwardMode)
_VERIFY = (ForwardMode.TARGET_VERIFY,)
_UNIFORM = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)


@fault(
    slug="tree-mask-accepted-but-ignored",
    source="sglang KNOWN_FAILURES.md C.2",
    modes=_VERIFY,
    checks=("matches-oracle",),
    hint="tree mask",
)
class TreeMaskIgnored(DenseBackend):
    """Trees are declared, and drafts are processed as a chain."""

    @override
    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        return node[:, None] <= offset[:, None]


@fault(
    slug="declares-it-writes-kv",
    source="vllm-plugin-FL #353",
    modes=_ALL,
    checks=("writes-own-kv",),
    hint="was not written",
)
class NeverWritesKv(PlannedBackend):
    """Forward is declared to update the KV cache, and does not."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        return None


@fault(
    slug="out-shape-check-lacks-q-dim",
    source="flashinfer #2876, #2856; flash-attention #976",
    modes=_UNIFORM,
    executions=("graph",),
    checks=("completes", "captures-cleanly"),
    hint="out",
)
class OutShapeCheckLacksRows(PlannedBackend):
    """An output buffer, which only graphs pass, is checked against a shape without the rows of a request."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        wanted = (len(meta.kv_lens), *out.shape[1:])
        if self.in_graph and out.shape != wanted:
            raise ValueError(f"out has shape {tuple(out.shape)}, expected {wanted}")
        return out


@fault(
    slug="squeeze-instead-of-flatten",
    source="lmdeploy #4302; sglang KNOWN_FAILURES.md C.4",
    modes=_UNIFORM,
    checks=("output-contract",),
    hint="shape",
)
class SqueezeInsteadOfFlatten(PlannedBackend):
    """The row dimension of the output is squeezed away, which works for one row."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        return out.reshape(len(meta.kv_lens), -1, *out.shape[1:]).squeeze(1)


@fault(
    slug="returns-float32",
    source="general",
    modes=_ALL,
    checks=("output-contract",),
    hint="float32",
)
class ReturnsFloat32(PlannedBackend):
    """The accumulator is returned without the cast to the model's dtype."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return super().attend(q, layer, meta).float()


@fault(
    slug="returns-the-whole-buffer",
    source="general",
    modes=_ALL,
    checks=("output-contract",),
    hint="shape",
)
class ReturnsWholeBuffer(PlannedBackend):
    """The persistent output buffer of the largest batch is returned, not the rows of this one."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = q.new_zeros(self.context.max_num_tokens + 1, layer.tp_q_head_num, layer.v_head_dim)
        out[: len(q)] = super().attend(q, layer, meta)
        return out


@fault(
    slug="constructor-checks-nothing",
    source="vllm-ascend #15503",
    modes=_ALL,
    executions=("eager",),
    checks=("refuses-undeclared",),
    hint="the constructor accepted it",
)
class ConstructorChecksNothing(DenseBackend):
    """The constructor does not compare the context with the capabilities, and accepts undeclared contexts."""

    def __init__(self, context: BackendContext) -> None:
        self.context, self.mask_buffer = context, None
        self.key = torch.arange(context.max_context_len, device=context.device)


@fault(
    slug="constructor-refuses-a-capability",
    source="general",
    modes=_ALL,
    checks=("completes",),
    hint="refused a declared case",
)
class ConstructorRefusesCapability(DenseBackend):
    """Pages of 1 slot are declared, and the constructor refuses them."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if context.page_size == 1:
            raise Unsupported("page size 1 is not implemented")


@fault(
    slug="scales-q-in-place",
    source="general",
    modes=_ALL,
    checks=("inputs-unchanged",),
    hint="q",
)
class ScalesQInPlace(DenseBackend):
    """q is multiplied by the scale in place, in the caller's tensor."""

    @override
    def queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        rows = super().queries(q, layer)
        q *= layer.scaling
        return rows


@fault(
    slug="advances-seq-lens-in-place",
    source="general",
    modes=_VERIFY,
    executions=("eager",),
    checks=("inputs-unchanged",),
    hint="seq_lens",
)
class AdvancesSeqLens(DenseBackend):
    """seq_lens of verify is turned into the length with drafts by an addition in place."""

    @override
    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        found = super().visibility(batch, counts, offset)
        batch.seq_lens += counts
        return found


@fault(
    slug="k-and-v-swapped-on-store",
    source="general",
    modes=_ALL,
    checks=("writes-own-kv",),
    hint="K instead of V|an FP8 pool holds K / k_scale",
)
class KAndVSwapped(PlannedBackend):
    """The store is called with k and v exchanged."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, v, k, meta)


@fault(
    slug="fp8-store-without-scale",
    source="general",
    modes=_ALL,
    checks=("writes-own-kv",),
    hint="do(es)? not hold",
)
class Fp8StoreWithoutScale(PlannedBackend):
    """Rows are cast to FP8 without the scale, and multiplied by it when they are read."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k * layer.k_scale, v * layer.v_scale, meta)


@fault(
    slug="kv-of-the-other-layer",
    source="general",
    modes=_ALL,
    checks=("writes-own-kv",),
    hint="other layer",
    modelled="rows of layer 1 are stored for both layers",
)
class KvOfTheOtherLayer(PlannedBackend):
    """Rows are stored after the call, from a reference that the next layer has moved on."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        for other in self.context.layers[: self.context.layers.index(layer) + 1]:
            super().write_kv(other, k, v, meta)
