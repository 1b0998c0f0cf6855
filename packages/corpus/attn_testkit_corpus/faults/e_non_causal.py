"""Class E: non-causal layers: draft blocks and encoders, whose rows see all keys of their request."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, refuse_undeclared

from .catalogue import fault
from .dense import DenseBackend, Visibility

_MODES = frozenset({ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
CAUSAL = DenseBackend.capabilities.with_changes(
    eager=_MODES, graph=_MODES, families={"gqa"}, dtypes={"bf16"}, kv_dtypes={"same"}, head_dims={64},
    gqa_ratios={2, 4}, logit_cap=False, sinks=False, max_context_len=1 << 14,
)  # fmt: skip
"""Capabilities with few values in fields that do not matter here."""
NON_CAUSAL = CAUSAL.with_changes(non_causal=_MODES)


class BlockBackend(DenseBackend):
    """Healthy parent: rows of non-causal layers see all keys of their request."""

    capabilities = NON_CAUSAL

    @override
    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key_position, seen = super().visibility(batch, counts, offset)
        return position, key_position, seen if self.context.causal else self.of_block(seen)

    def of_block(self, seen: torch.Tensor) -> torch.Tensor:
        """[B, W, C] bool: visibility without causality, from ``seen``, which is causal."""
        return (self.key < self.kv_lens[:, None, None]).expand_as(seen)


@fault(
    slug="causal-mask-in-layers-that-are-not",
    source="general; causal=False of vLLM's common metadata, ENCODER_ONLY layers of sglang",
    modes=_MODES,
    checks=("matches-oracle",),
    hint="KV tokens after the row's own position are missing",
)
class CausalMaskInLayersThatAreNot(DenseBackend):
    """Non-causal layers are declared, and the kernel never reads the layer's flag."""

    capabilities = NON_CAUSAL


@fault(
    slug="draft-block-causal-in-verify-alone",
    source="general; draft blocks (DFlash)",
    modes=(ForwardMode.TARGET_VERIFY,),
    checks=("matches-oracle",),
    hint="KV tokens after the row's own position are missing",
)
class DraftBlockCausalInVerify(BlockBackend):
    """Extend reads the layer's flag, and verify, which builds its own mask, does not."""

    @override
    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        if batch.forward_mode.is_target_verify():
            return DenseBackend.visibility(self, batch, counts, offset)
        return super().visibility(batch, counts, offset)


@fault(
    slug="encoder-rows-without-a-prefix",
    source="general; encoder kernels that attend k and v as given",
    modes=_MODES,
    checks=("matches-oracle",),
    hint="the whole prefix is missing|first .* KV tokens are missing",
)
class EncoderRowsWithoutAPrefix(BlockBackend):
    """Rows of a non-causal layer see each other and nothing of the prefix."""

    @override
    def of_block(self, seen: torch.Tensor) -> torch.Tensor:
        return super().of_block(seen) & (self.key >= (self.kv_lens - self.counts)[:, None, None])


@fault(
    slug="without-causality-no-end",
    source="general; a length that only the causal mask bounded",
    modes=_MODES,
    checks=("reads-own-kv", "matches-oracle", "finite"),
    hint="slots after the last KV token|later tokens|is read",
)
class WithoutCausalityNoEnd(BlockBackend):
    """The last page counts as full without a causal mask, which hid its tail."""

    @override
    def of_block(self, seen: torch.Tensor) -> torch.Tensor:
        page = self.context.page_size
        full = -(-self.kv_lens // page) * page
        return (self.key < full[:, None, None]).expand_as(seen)


@fault(
    slug="layers-that-are-not-causal-are-accepted",
    source="general",
    modes=(ForwardMode.EXTEND,),
    executions=("eager",),
    checks=("refuses-undeclared",),
    hint="a layer that is not causal",
)
class LayersThatAreNotCausalAreAccepted(BlockBackend):
    """Non-causal layers are declared only for draft blocks, and the constructor accepts an encoder's."""

    capabilities = CAUSAL.with_changes(non_causal={ForwardMode.TARGET_VERIFY})

    def __init__(self, context: BackendContext) -> None:
        refuse_undeclared(NON_CAUSAL, context)
        self.context, self.mask_buffer = context, None
        self.key = torch.arange(context.max_context_len, device=context.device)
