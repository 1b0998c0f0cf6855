"""Class L: wrappers, capabilities and the contract of hooks, inputs and outputs."""

from __future__ import annotations

import torch

from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    Unsupported,
    VerifyInput,
)

from .catalogue import fault
from .dense import DenseBackend, Visibility
from .parent import Metadata, PlannedBackend


@fault(
    "sglang KNOWN_FAILURES.md C.2",
    "matches-oracle",
    "tree mask",
    modes="target-verify",
    slug="tree-mask-accepted-but-ignored",
)
class TreeMaskIgnored(DenseBackend):
    """Trees are declared, but drafts are processed as a chain."""

    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        return node[:, None] <= offset[:, None]


@fault("vllm-plugin-FL #353", "writes-own-kv", "was not written", slug="declares-it-writes-kv")
class NeverWritesKv(PlannedBackend):
    """Forward is declared to update the KV cache, but does not."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        return None


@fault(
    "flashinfer #2876, #2856; flash-attention #976",
    "completes captures-cleanly",
    "out",
    modes="target-verify draft-extend-v2",
    executions="graph",
    slug="out-shape-check-lacks-q-dim",
)
class OutShapeCheckLacksRows(PlannedBackend):
    """An output buffer, which only graphs pass, is checked against a shape without the rows of a request."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        wanted = (len(meta.kv_lens), *out.shape[1:])
        if self.in_graph and out.shape != wanted:
            raise ValueError(f"out has shape {tuple(out.shape)}, expected {wanted}")
        return out


@fault(
    "lmdeploy #4302; sglang KNOWN_FAILURES.md C.4", "output-contract", "shape", modes="target-verify draft-extend-v2"
)
class SqueezeInsteadOfFlatten(PlannedBackend):
    """The row dimension of the output is squeezed away, which works for one row."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        return out.reshape(len(meta.kv_lens), -1, *out.shape[1:]).squeeze(1)


@fault("general", "output-contract", "float32")
class ReturnsFloat32(PlannedBackend):
    """The accumulator is returned without the cast to the model's dtype."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return super().attend(q, layer, meta).float()


@fault("general", "output-contract", "shape", slug="returns-the-whole-buffer")
class ReturnsWholeBuffer(PlannedBackend):
    """The persistent output buffer of the largest batch is returned, not the rows of this one."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = q.new_zeros(self.context.max_num_tokens + 1, layer.tp_q_head_num, layer.v_head_dim)
        out[: len(q)] = super().attend(q, layer, meta)
        return out


@fault("vllm-ascend #15503", "refuses-undeclared", "the constructor accepted it", executions="eager")
class ConstructorChecksNothing(DenseBackend):
    """The constructor does not compare the context with the capabilities, and accepts undeclared contexts."""

    def __init__(self, context: BackendContext) -> None:
        self.context, self.mask_buffer = context, None
        self.key = torch.arange(context.max_context_len, device=context.device)


@fault("general", "completes", "refused a declared case", slug="constructor-refuses-a-capability")
class ConstructorRefusesCapability(DenseBackend):
    """Pages of 1 slot are declared, and the constructor refuses them."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if context.page_size == 1:
            raise Unsupported("page size 1 is not implemented")


@fault("general", "inputs-unchanged", "q")
class ScalesQInPlace(DenseBackend):
    """q is multiplied by the scale in place, in the caller's tensor."""

    def queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        rows = super().queries(q, layer)
        q *= layer.scaling
        return rows


@fault(
    "general",
    "inputs-unchanged",
    "seq_lens",
    modes="target-verify",
    executions="eager",
    slug="advances-seq-lens-in-place",
)
class AdvancesSeqLens(DenseBackend):
    """seq_lens of verify is turned into the length with drafts by an addition in place."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        found = super().visibility(batch, counts, offset)
        batch.seq_lens += counts
        return found


@fault("general", "writes-own-kv", "K instead of V|an FP8 pool holds K / k_scale", slug="k-and-v-swapped-on-store")
class KAndVSwapped(PlannedBackend):
    """The store is called with k and v exchanged."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, v, k, meta)


@fault("general", "writes-own-kv", "do(es)? not hold")
class Fp8StoreWithoutScale(PlannedBackend):
    """Rows are cast to FP8 without the scale, and multiplied by it when they are read."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k * layer.k_scale, v * layer.v_scale, meta)


@fault("general", "writes-own-kv", "other layer", modelled="rows of layer 1 are stored for both layers")
class KvOfTheOtherLayer(PlannedBackend):
    """Rows are stored after the call, through a reference that the next layer has changed."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        for other in self.context.layers[: self.context.layers.index(layer) + 1]:
            super().write_kv(other, k, v, meta)
