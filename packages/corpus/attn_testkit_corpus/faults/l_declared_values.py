"""Class L, declared values: one of several declared values has no kernel, and the launched one writes zeros.

Tables of kernels are written value by value, and a missing entry shows only at that value.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_testkit.contract import AttentionLayer, Capabilities, ForwardBatch, ForwardMode

from .catalogue import fault
from .dense import DenseBackend, Visibility

DECODE, VERIFY, V1, V2, *_ = ForwardMode


def _capabilities(**changes: object) -> Capabilities:
    """Capabilities with few values, except for one field."""
    few: dict[str, object] = {
        "heads": {"families": {"mha"}, "head_dims": {64}, "gqa_ratios": {1}},
        "precision": {"dtypes": {"bf16"}},
        "kv_pool": {"kv_dtypes": {"same"}, "page_sizes": {16}},
        "bounds": {"max_q_rows": 8, "max_topk": 1, "max_context_len": 1024},
        "windows": {"modes": (), "in_trees": False},
        "options": {"logit_cap": False, "sinks": False},
    }
    return DenseBackend.capabilities.with_changes(**few).with_changes(**changes)


@fault("general", "matches-oracle", "nothing was computed|nothing computed them", modes="decode", executions="eager")
class NoKernelForAHeadDimBetweenOthers(DenseBackend):
    """Head dims 64, 96, 128 and 256 are declared, but the table of kernels has only powers of two."""

    capabilities = _capabilities(heads={"head_dims": {64, 96, 128, 256}})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().weights(logits, seen, layer) * (layer.v_head_dim != 96)


@fault("general", "matches-oracle", "nothing was computed|nothing computed them", modes="decode", executions="eager")
class NoKernelForTheWidestHeadDim(DenseBackend):
    """Head dim 512 is declared with 64 and 128, but has kernels only for MLA."""

    capabilities = _capabilities(heads={"head_dims": {64, 128, 512}})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().weights(logits, seen, layer) * (layer.v_head_dim != 512)


@fault("general", "matches-oracle", "nothing was computed|nothing computed them", modes="decode", executions="eager")
class NoKernelForALatentWidth(DenseBackend):
    """MLA shares a list of head dims with other families, and latent rows of 512 have no kernel."""

    capabilities = _capabilities(heads={"families": {"gqa", "mla"}, "head_dims": {64, 128, 512}, "gqa_ratios": {2, 16}})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().weights(logits, seen, layer) * (layer.kv_lora_rank != 512)


@fault("general", "matches-oracle", "nothing was computed|nothing computed them", modes="decode", executions="eager")
class NoKernelForAPageSize(DenseBackend):
    """Eight page sizes are declared, but pages of 8 slots have no kernel."""

    capabilities = _capabilities(kv_pool={"page_sizes": {1, 2, 4, 8, 16, 32, 64, 128}})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().weights(logits, seen, layer) * (self.context.page_size != 8)


@fault("general", "matches-oracle", "nothing was computed|nothing computed them", modes="decode", executions="eager")
class NoKernelForAGroupBetweenOthers(DenseBackend):
    """Groups of 2, 8, 16 and 32 query heads are declared, but 16 have no kernel."""

    capabilities = _capabilities(heads={"families": {"gqa"}, "gqa_ratios": {2, 8, 16, 32}})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().weights(logits, seen, layer) * (layer.q_per_kv != 16)


@fault("general", "matches-oracle", "nothing was computed|nothing computed them", modes="decode", executions="eager")
class NoKernelForFewMLAHeads(DenseBackend):
    """4 and 16 heads are declared for MLA, but 4 heads, fewer than a tile's rows, have no kernel."""

    capabilities = _capabilities(heads={"families": {"mla"}, "gqa_ratios": {4, 16}})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().weights(logits, seen, layer) * (layer.tp_q_head_num != 4)


@fault(
    "flashinfer #4347",
    "keys-counted-once matches-oracle",
    "KV tokens in the middle are missing",
    modes="decode",
    executions="eager",
    slug="large-pages-lost-behind-4096-tokens",
)
class LargePagesLostBehind4096Tokens(DenseBackend):
    """Only 16 pages of 256 slots are read from the table, and the last page separately: those in between are lost."""

    capabilities = _capabilities(kv_pool={"page_sizes": {16, 256}}, bounds={"max_context_len": 1 << 13})

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key_position, visible = super().visibility(batch, counts, offset)
        page = self.context.page_size
        last = (self.kv_lens - 1) // page * page
        held = (self.key < 4096) | (self.key >= last[:, None]) | (page < 256)
        return position, key_position, visible & held[:, None]


@fault(
    "vLLM #46952",
    "matches-oracle",
    "holds the result of request [0-9]+",
    modes="decode target-verify",
    executions="eager",
)
class MLAHeadsFoldedWithAnFP8Pool(DenseBackend):
    """32 heads are folded to two rows of 16 with an FP8 pool, but their results are not unfolded."""

    capabilities = _capabilities(
        heads={"families": {"mla"}, "gqa_ratios": {16, 32, 64}}, kv_pool={"kv_dtypes": {"same", "fp8_e4m3"}}
    )

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        out = super().forward(*args, **named)
        if out.shape[1] != 32 or self.context.kv_pool.dtype.itemsize > 1:
            return out
        return out.view(2, -1, 16, out.shape[-1]).transpose(0, 1).reshape(out.shape)


@fault("general", "matches-oracle", "nothing was computed|nothing computed them", modes="decode", executions="eager")
class NoKernelForADtypeWithAnFP8Pool(DenseBackend):
    """Both dtypes and both pools are declared, but fp16 queries with an FP8 pool have no kernel."""

    capabilities = _capabilities(precision={"dtypes": {"fp16", "bf16"}}, kv_pool={"kv_dtypes": {"same", "fp8_e4m3"}})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        pair = (self.context.dtype, self.context.kv_pool.dtype)
        return super().weights(logits, seen, layer) * (pair != (torch.float16, torch.float8_e4m3fn))


@fault("general", "matches-oracle", "rows from 8 on", modes="target-verify", executions="eager")
class VerifyRowsBeyondATile(DenseBackend):
    """The grid has one tile of 8 rows per request: of 12 draft nodes the last four are never computed."""

    capabilities = _capabilities(bounds={"max_q_rows": 12})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return _first_rows(super().weights(logits, seen, layer), 8)


@fault("general", "matches-oracle", "rows from 48 on", modes="draft-extend", executions="eager")
class DraftExtendRowsBeyondTheTiles(DenseBackend):
    """The grid has three tiles of 16 rows per request, but 64 accepted tokens are declared."""

    capabilities = _capabilities(bounds={"max_q_rows": 64})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return _first_rows(super().weights(logits, seen, layer), 48)


@fault("general", "matches-oracle", "rows from 48 on", modes="draft-extend-v2", executions="eager")
class DraftExtendV2RowsBeyondTheTiles(DenseBackend):
    """The grid has three tiles of 16 rows per request, but 64 nodes are declared."""

    capabilities = _capabilities(bounds={"max_q_rows": 64})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return _first_rows(super().weights(logits, seen, layer), 48)


@fault(
    "general", "matches-oracle", "nothing was computed|nothing computed them", modes="target-verify", executions="eager"
)
class NoKernelForWideTrees(DenseBackend):
    """Trees of up to 8 children per node are declared, but masks of more than 4 have no kernel."""

    capabilities = _capabilities(bounds={"max_q_rows": 16, "max_topk": 8})

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().weights(logits, seen, layer) * (self.context.topk <= 4)


def _first_rows(weights: torch.Tensor, count: int) -> torch.Tensor:
    """``weights`` [B, Hk, G, W, C] with zeros for the rows from ``count`` on."""
    row = torch.arange(weights.shape[3], device=weights.device)
    return weights * (row < count)[:, None]


@fault("flashinfer #3863", "completes", "shared memory", modes="extend", executions="eager")
class TileOfRowsTooWideForHeads(DenseBackend):
    """A prompt of many rows takes a tile of 32, whose sums do not fit for heads of 512 and a pool of FP8."""

    capabilities = DenseBackend.capabilities.with_changes(
        eager={"extend"},
        graph=(),
        heads={"families": {"gqa"}, "gqa_ratios": {2}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"page_sizes": {16}},
        windows=(),
        options={"logit_cap": False, "sinks": False},
    )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        narrow = self.context.kv_pool.get_kv_buffer(layer.layer_id)[0].dtype.itemsize == 1
        if narrow and layer.head_dim > 256 and len(q) > 16 * batch.batch_size:
            raise RuntimeError("required shared memory (132176 bytes) exceeds this GPU's limit (101376 bytes)")
        return super().forward(q, k, v, layer, batch, save_kv_cache)
