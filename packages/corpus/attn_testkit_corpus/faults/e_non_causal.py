"""Class E: non-causal layers: draft blocks and encoders, whose rows see all keys of their request."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, refuse_undeclared

from .catalogue import fault
from .dense import DenseBackend, Visibility

_MODES = frozenset({ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
CAUSAL = DenseBackend.capabilities.with_changes(
    eager=_MODES,
    graph=_MODES,
    heads={"families": {"gqa"}, "head_dims": {64}, "gqa_ratios": {2, 4}},
    precision={"dtypes": {"bf16"}},
    kv_pool={"kv_dtypes": {"same"}},
    options={"logit_cap": False, "sinks": False},
    bounds={"max_context_len": 1 << 14},
)
"""Capabilities with few values in fields that do not matter for this file."""
NON_CAUSAL = CAUSAL.with_changes(options={"non_causal": _MODES})


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
    "general; causal=False of vLLM's common metadata, ENCODER_ONLY layers of sglang",
    "matches-oracle",
    "KV tokens after the row's own position are missing",
    modes="target-verify extend",
)
class CausalMaskInLayersThatAreNot(DenseBackend):
    """Non-causal layers are declared, but the kernel never reads the layer's flag."""

    capabilities = NON_CAUSAL


@fault(
    "general; draft blocks (DFlash)",
    "matches-oracle",
    "KV tokens after the row's own position are missing",
    modes="target-verify",
    slug="draft-block-causal-in-verify-alone",
)
class DraftBlockCausalInVerify(BlockBackend):
    """Extend reads the layer's flag, but verify, which builds its own mask, does not."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        if batch.forward_mode.is_target_verify():
            return DenseBackend.visibility(self, batch, counts, offset)
        return super().visibility(batch, counts, offset)


@fault(
    "general; encoder kernels that attend to k and v as passed",
    "matches-oracle",
    "the whole prefix is missing|first .* KV tokens are missing",
    modes="target-verify extend",
)
class EncoderRowsWithoutAPrefix(BlockBackend):
    """Rows of a non-causal layer see only each other, and no key of the prefix."""

    def of_block(self, seen: torch.Tensor) -> torch.Tensor:
        return super().of_block(seen) & (self.key >= (self.kv_lens - self.counts)[:, None, None])


@fault(
    "general; a length that only the causal mask bounded",
    "reads-own-kv matches-oracle finite",
    "slots after the last KV token|later tokens|is read",
    modes="target-verify extend",
)
class WithoutCausalityNoEnd(BlockBackend):
    """The last page counts as full without a causal mask, which hid its tail."""

    def of_block(self, seen: torch.Tensor) -> torch.Tensor:
        page = self.context.page_size
        full = -(-self.kv_lens // page) * page
        return (self.key < full[:, None, None]).expand_as(seen)


@fault("general", "refuses-undeclared", "a layer that is not causal", modes="extend", executions="eager")
class LayersThatAreNotCausalAreAccepted(BlockBackend):
    """Non-causal layers are declared only for draft blocks, but the constructor accepts those of an encoder."""

    capabilities = CAUSAL.with_changes(options={"non_causal": {ForwardMode.TARGET_VERIFY}})

    def __init__(self, context: BackendContext) -> None:
        refuse_undeclared(NON_CAUSAL, context)
        self.context, self.mask_buffer = context, None
        self.key = torch.arange(context.max_context_len, device=context.device)
