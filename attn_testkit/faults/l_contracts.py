"""Class L: wrappers, claims and the contract of hooks, inputs and outputs."""

from __future__ import annotations

import torch

from ..backends.torch_native import TorchNativeBackend
from ..contract import (
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    Unsupported,
    VerifyInput,
)
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = tuple(ForwardMode)
_VERIFY = (ForwardMode.TARGET_VERIFY,)
_UNIFORM = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)


@fault(
    slug="tree-mask-accepted-but-ignored",
    bug_class="L",
    source="sglang KNOWN_FAILURES.md C.2",
    modes=_VERIFY,
    mechanism="trees are claimed, and drafts are processed as a chain",
    promises=("matches-oracle",),
    hint="tree mask",
)
class TreeMaskIgnored(TorchNativeBackend):
    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        return node[:, None] <= offset[:, None]


@fault(
    slug="declares-it-writes-kv",
    bug_class="L",
    source="vllm-plugin-FL #353",
    modes=_ALL,
    mechanism="forward is declared to update the KV cache, and does not",
    promises=("writes-own-kv",),
    hint="was not written",
)
class NeverWritesKv(PlannedBackend):
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        return None


@fault(
    slug="out-shape-check-lacks-q-dim",
    bug_class="L",
    source="flashinfer #2876, #2856; flash-attention #976",
    modes=_UNIFORM,
    executions=("graph",),
    mechanism="an output buffer, which only graphs pass, is checked against a shape without the rows of a request",
    promises=("completes", "captures-cleanly"),
    hint="out",
)
class OutShapeCheckLacksRows(PlannedBackend):
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        wanted = (len(meta.kv_lens), *out.shape[1:])
        if self.in_graph and out.shape != wanted:
            raise ValueError(f"out has shape {tuple(out.shape)}, expected {wanted}")
        return out


@fault(
    slug="squeeze-instead-of-flatten",
    bug_class="L",
    source="lmdeploy #4302; sglang KNOWN_FAILURES.md C.4",
    modes=_UNIFORM,
    mechanism="the row dimension of the output is squeezed away, which works for one row",
    promises=("output-contract",),
    hint="shape",
)
class SqueezeInsteadOfFlatten(PlannedBackend):
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return _by_request(super().attend(q, layer, meta), len(meta.kv_lens)).squeeze(1)


@fault(
    slug="returns-float32",
    bug_class="L",
    source="general",
    modes=_ALL,
    mechanism="the accumulator is returned without the cast to the model's dtype",
    promises=("output-contract",),
    hint="float32",
)
class ReturnsFloat32(PlannedBackend):
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return super().attend(q, layer, meta).float()


@fault(
    slug="returns-the-whole-buffer",
    bug_class="L",
    source="general",
    modes=_ALL,
    mechanism="the persistent output buffer of the largest batch is returned, not the rows of this one",
    promises=("output-contract",),
    hint="shape",
)
class ReturnsWholeBuffer(PlannedBackend):
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = q.new_zeros(self.context.max_num_tokens + 1, layer.tp_q_head_num, layer.v_head_dim)
        out[: len(q)] = super().attend(q, layer, meta)
        return out


@fault(
    slug="constructor-checks-nothing",
    bug_class="L",
    source="vllm-ascend #15503",
    modes=_ALL,
    executions=("eager",),
    mechanism="the constructor does not compare the context with the claims, and takes what nobody claimed",
    promises=("refuses-undeclared",),
    hint="the constructor accepted it",
)
class ConstructorChecksNothing(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        self.context, self._mask = context, None
        self._key = torch.arange(context.max_context_len, device=context.device)


@fault(
    slug="constructor-refuses-a-claim",
    bug_class="L",
    source="general",
    modes=_ALL,
    mechanism="pages of 1 are claimed, and the constructor refuses them",
    promises=("completes",),
    hint="refused a claimed case",
)
class ConstructorRefusesClaim(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if context.page_size == 1:
            raise Unsupported("page size 1 is not implemented")


@fault(
    slug="scales-q-in-place",
    bug_class="L",
    source="general",
    modes=_ALL,
    mechanism="q is multiplied by the scale where it lies, in the caller's tensor",
    promises=("inputs-unchanged",),
    hint="q",
)
class ScalesQInPlace(TorchNativeBackend):
    def _queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        rows = super()._queries(q, layer)
        q *= layer.scaling
        return rows


@fault(
    slug="advances-seq-lens-in-place",
    bug_class="L",
    source="general",
    modes=_VERIFY,
    executions=("eager",),
    mechanism="seq_lens of verify is turned into the length with drafts by an addition in place",
    promises=("inputs-unchanged",),
    hint="seq_lens",
)
class AdvancesSeqLens(TorchNativeBackend):
    def _visibility(
        self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = super()._visibility(batch, counts, offset)
        batch.seq_lens += counts
        return found


@fault(
    slug="k-and-v-swapped-on-store",
    bug_class="L",
    source="general",
    modes=_ALL,
    mechanism="the store is called with v where k belongs",
    promises=("writes-own-kv",),
    hint="K where V belongs|an FP8 pool holds K / k_scale",
)
class KAndVSwapped(PlannedBackend):
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, v, k, meta)


@fault(
    slug="fp8-store-without-scale",
    bug_class="L",
    source="general",
    modes=_ALL,
    mechanism="rows are cast to FP8 as they are, and multiplied by the scale when they are read",
    promises=("writes-own-kv",),
    hint="do(es)? not hold",
)
class Fp8StoreWithoutScale(PlannedBackend):
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k * layer.k_scale, v * layer.v_scale, meta)


@fault(
    slug="kv-of-the-other-layer",
    bug_class="L",
    source="general",
    modes=_ALL,
    mechanism="rows are stored after the call, from a reference that the next layer has moved on",
    promises=("writes-own-kv",),
    hint="other layer",
    modelled="rows of layer 1 are stored for both layers",
)
class KvOfTheOtherLayer(PlannedBackend):
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        for other in self.context.layers[: layer.layer_id + 1]:
            super().write_kv(other, k, v, meta)


def _by_request(out: torch.Tensor, requests: int) -> torch.Tensor:
    """[T, Hq, Dv] -> [requests, T / requests, Hq, Dv]."""
    return out.reshape(requests, -1, *out.shape[1:])
