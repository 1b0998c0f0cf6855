"""Class G: products of float32 in tf32, the default of tensor cores."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import PlannedBackend

_ALL = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
FLOAT32 = LEAN.with_changes(precision={"dtypes": {"fp32"}}, bounds={"max_context_len": 1 << 13})
_LOW_BITS = (1 << 13) - 1


def in_tf32(numbers: torch.Tensor) -> torch.Tensor:
    """Float32 numbers, cut off to 10 bits of mantissa."""
    return (numbers.contiguous().view(torch.int32) & ~_LOW_BITS).view(torch.float32)


@fault(
    "vLLM (unified attention); tl.dot without input_precision",
    "matches-oracle",
    "fp32_products",
    modes=_ALL,
    modelled="factors are cut off before a product of float32",
)
class Float32ProductsInTf32(PlannedBackend):
    """Both products of float32 are computed in tf32, which is not declared."""

    capabilities = FLOAT32

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(in_tf32(rows), in_tf32(keys), layer)

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        super().partials(logits, seen, in_tf32(values), acc, lse)


@fault(
    "general; tl.dot of float32 with bf16 operands, one pass of bf16x3",
    "matches-oracle",
    "the right KV tokens",
    modes=_ALL,
    slug="float32-products-in-bf16-declared-as-tf32",
    modelled="factors are rounded before a product of float32",
)
class Float32ProductsInBf16(PlannedBackend):
    """Both products of float32 are computed in bf16, but tf32 is declared, which has three bits more."""

    capabilities = FLOAT32.with_changes(precision={"fp32_products": "tf32"})

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows.bfloat16().float(), keys.bfloat16().float(), layer)

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        super().partials(logits, seen, values.bfloat16().float(), acc, lse)
