"""Class G: numbers that are narrower than declared: FP8 stores, queries and probabilities, 16-bit sums."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer

from .builds import TiledBackend
from .c_new_rows import FP8
from .catalogue import fault
from .dense import DenseBackend
from .parent import Metadata, PlannedBackend

_E4M3 = torch.float8_e4m3fn


@fault("general; torch casts of sglang's set_kv_buffer", "writes-own-kv finite", "NaN|nan|saturat")
class Fp8StoreDoesNotSaturate(PlannedBackend):
    """Rows are cast to e4m3 without a limit, so everything beyond 448 becomes NaN."""

    capabilities = FP8

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        buffers = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        for buffer, rows, scale in zip(buffers, (k, v), (layer.k_scale, layer.v_scale), strict=True):
            rows = (rows.float() / scale).reshape(-1, *buffer.shape[1:])
            # The result of such a cast differs between devices, and between releases of torch.
            stored = rows.to(_E4M3).view(torch.uint8).masked_fill(rows.abs() > 448, 0x7F)
            buffer.view(torch.uint8)[meta.slots] = stored


@fault("general (half is added before a store truncates)", "writes-own-kv", "one step from the right")
class Fp8StoreRoundsHalfAwayFromZero(PlannedBackend):
    """Keys halfway between two FP8 numbers are stored as the larger one. One of 16 bf16 numbers is halfway."""

    capabilities = FP8

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        # Between two bf16 numbers: only what is exactly halfway moves.
        super().write_kv(layer, k.float() * (1 + 2.0**-12), v, meta)


@fault("general", "matches-oracle", "matmul_dtype")
class Fp8QueriesNotDeclared(DenseBackend):
    """Queries are rounded to FP8 with an FP8 pool, although matmul_dtype declares the model's dtype."""

    capabilities = DenseBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"fp8_e4m3"}}, heads={"families": {"gqa"}}, precision={"dtypes": {"bf16"}}
    )

    def queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().queries(q, layer).clamp(-448, 448).to(_E4M3).float()


class Fp8Probabilities(PlannedBackend):
    """Healthy parent: queries and probabilities in FP8, the latter times 256, with a row's largest at 1."""

    capabilities = FP8.with_changes(precision={"matmul_dtype": "fp8_e4m3"})

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows.to(_E4M3).float(), keys, layer)

    @override
    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        masked = logits[:, None].masked_fill(~seen[:, :, :, None, None], -torch.inf)
        top = masked.amax(-1, keepdim=True)
        p = torch.exp(masked - top.masked_fill(top == -torch.inf, 0.0))
        total = p.sum(-1, keepdim=True).clamp(min=1e-30)
        acc.copy_(torch.einsum("bnwhgs,bshd->bnwhgd", self.rounded(p, total), values).flatten(3, 4))
        lse.copy_((top + total.log()).squeeze(-1).flatten(3, 4))

    def rounded(self, p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Probabilities, from ``p`` relative to the row's largest, and their ``total``."""
        return (p * 256).to(_E4M3).float() / (256 * total)


@fault("general; the limit that servers have for e4m3fnuz of ROCm", "matches-oracle", slug="fp8-queries-limited-to-224")
class Fp8QueriesLimitedTo224(Fp8Probabilities):
    """Queries are limited to 224 before they are rounded to an FP8 that ends at 448."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows.clamp(-224, 224), keys, layer)


@fault("general", "matches-oracle", "weights|saturation|precision")
class Fp8ProbabilitiesWithoutALift(Fp8Probabilities):
    """Probabilities that sum to 1 are rounded to FP8, in which those of a long request are 0."""

    def rounded(self, p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return (p / total).to(_E4M3).float()


@fault("flashinfer #5020", "matches-oracle", "rounded to FP8 without a factor")
class Fp8ProbabilitiesWithoutAFactor(Fp8Probabilities):
    """Probabilities of at most 1 are rounded to FP8, in which small ones vanish; their sum is computed before that."""

    def rounded(self, p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return p.to(_E4M3).float() / total


@fault(
    "general; FP8 kernels of vLLM on an H200, whose errors were once reported as a wrong scale",
    "matches-oracle",
    "matmul_dtype",
)
class Fp8PartialSumsOfFewWeights(Fp8Probabilities):
    """Products are made in FP8 although matmul_dtype declares the model's dtype: probabilities below 2^-10 of a row's
    largest are 0, and the partial result of each split is rounded to bf16."""

    capabilities = FP8

    def rounded(self, p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return p.masked_fill(p < 2.0**-10, 0.0).to(_E4M3).float() / total

    @override
    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        super().partials(logits, seen, values, acc, lse)
        acc.copy_(acc.bfloat16().float())


@fault("general; fp16 accumulators of tensor cores", "matches-oracle", "sums", slug="sums-of-16-bits")
class SumsOf16Bits(TiledBackend):
    """P V of fp16 is accumulated in fp16, sixteen keys at a time."""

    capabilities = TiledBackend.capabilities.with_changes(
        precision={"dtypes": {"fp16"}}, kv_pool={"kv_dtypes": {"same"}}
    )
    keys_in_tile = 16

    def added(self, out: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return (out + part).half().float()


@fault("llama.cpp #17746, llama.cpp #18614", "finite matches-oracle", "overflow", slug="products-of-16-bits-overflow")
class ProductsOf16BitsOverflow(TiledBackend):
    """P V of a tile of keys is rounded to fp16 before it is added in float32, so large values overflow."""

    capabilities = TiledBackend.capabilities.with_changes(
        precision={"dtypes": {"fp16"}}, kv_pool={"kv_dtypes": {"same"}}
    )
    keys_in_tile = 16

    def added(self, out: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return out + part.half().float()


@fault("general; vLLM #53334", "finite", "overflow")
class Bf16RowsConvertedToFp16(TiledBackend):
    """Keys and values of a bf16 model are converted to fp16 for the kernel, in which large ones are infinite."""

    capabilities = TiledBackend.capabilities.with_changes(
        precision={"dtypes": {"bf16"}}, kv_pool={"kv_dtypes": {"same"}}
    )

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows, keys.half().float(), layer)

    def product(self, p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return super().product(p, values.half().float())
