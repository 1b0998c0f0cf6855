"""Healthy controls of conventions in which servers and kernels differ, each declared."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode, VerifyInput

from .b_padded_requests import OffsetsBackend
from .b_padded_tokens import SlotsOfTheForward
from .builds import RegisterRowsBackend
from .c_new_rows import FP8
from .catalogue import control
from .d_full_contexts import ContextOfPrefixes
from .dense import DenseBackend
from .g_narrow_numbers import Fp8Probabilities, Fp8ProbabilitiesWithoutAFactor
from .g_tf32 import FLOAT32, Float32ProductsInTf32
from .j_outputs import LentOutput
from .multi_step import MultiStepBackend
from .parent import Metadata, PlannedBackend


@control()
class NewRowsAsGiven(RegisterRowsBackend):
    """New rows are attended to in the model's dtype and stored in FP8, as declared (sglang's and vLLM's prefill)."""

    capabilities = FP8.with_changes(precision={"new_rows_as_given": FP8.eager}, server={"takes_none_kv": True})


@control()
class DraftRowsAsGiven(MultiStepBackend, RegisterRowsBackend):
    """A forward's own rows in the model's dtype; those of the draft's earlier forwards from the FP8 pool."""

    capabilities = MultiStepBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"fp8_e4m3"}}, precision={"new_rows_as_given": {ForwardMode.DRAFT_DECODE}}
    )


@control()
class Fp8ProbabilitiesLifted(Fp8Probabilities):
    """Probabilities in FP8 times 256 and queries in FP8, as declared (FlashAttention 3)."""


@control()
class Fp8ProbabilitiesUnscaled(Fp8ProbabilitiesWithoutAFactor):
    """Probabilities of at most 1 in FP8, as declared."""

    capabilities = Fp8Probabilities.capabilities.with_changes(precision={"matmul_dtype": "fp8_e4m3_unscaled"})


@control()
class MetadataBuiltTwice(PlannedBackend):
    """Metadata are built for the warm-up and again for the capture, in the same buffers (vLLM)."""

    capabilities = PlannedBackend.capabilities.with_changes(
        heads={"families": {"gqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}},
        options={"logit_cap": False, "sinks": False},
    )

    def init_forward_metadata_before_capture(self, batch: ForwardBatch) -> None:
        self.init_forward_metadata_out_graph(batch, in_capture=True)


@control()
class KernelByCaptureSizes(PlannedBackend):
    """Batches of the largest graph's size and more are not split, and the second change of kernels is declared."""

    capabilities = MetadataBuiltTwice.capabilities.with_changes(bounds={"kernel_changes_at": {5}})

    def in_split(self, meta: Metadata) -> torch.Tensor:
        splits, bs = super().in_split(meta), len(meta.kv_lens)
        if bs < 5 and bs < self.context.capture_sizes[-1]:
            return splits
        return torch.stack([splits.any(1), *[torch.zeros_like(splits[:, 0])] * (self.max_splits - 1)], 1)


@control()
class EmptyBatches(PlannedBackend):
    """An eager batch without requests is neither planned nor run, and its output has no row (sglang's idle mode)."""

    capabilities = MetadataBuiltTwice.capabilities.with_changes(server={"takes_empty_batches": True})

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.batch_size:
            super().init_forward_metadata(batch)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if not batch.batch_size:
            return q.new_empty(0, layer.tp_q_head_num * layer.v_head_dim)
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@control()
class PaddedRequestsHaveNothing(OffsetsBackend):
    """Rows are counted by query_start_loc, and padded requests have neither rows nor keys (vLLM)."""


@control()
class VerifyLengthsWithNewTokens(PlannedBackend):
    """seq_lens of target-verify count its own tokens, and chains come without a tree (vLLM)."""

    capabilities = MetadataBuiltTwice.capabilities.with_changes(
        eager={"target-verify"}, graph={"target-verify"}, server={"verify_lens": {"all"}, "takes_bare_chains": True}
    )

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return batch.seq_lens[: batch.batch_size].to(torch.int32)

    def plan_mask(self, batch: ForwardBatch) -> torch.Tensor:
        spec, n = batch.spec_info, self.context.num_draft_tokens
        assert isinstance(spec, VerifyInput)
        if spec.custom_mask is not None:
            lens = (batch.seq_lens[: batch.batch_size] - n).clamp(min=0)
            return super().plan_mask(cast(ForwardBatch, SimpleNamespace(**{**vars(batch), "seq_lens": lens})))
        return self.index.new_ones(n, n, dtype=torch.bool).tril().expand(batch.batch_size, -1, -1)


@control("lent-output")
class WritesWhereItIsAsked(LentOutput):
    """The output is written to the caller's memory if ``out`` is given (vLLM)."""


@control()
class MoreRowsThanPlanned(SlotsOfTheForward):
    """Rows after those of the plan are stored in page 0, and their output is arbitrary."""


@control()
class Float32InTf32(Float32ProductsInTf32):
    """Products of float32 are computed in tf32, as declared (Triton's default)."""

    capabilities = FLOAT32.with_changes(precision={"fp32_products": "tf32"})


@control()
class PaddingIsNotStored(DenseBackend):
    """Rows of padding have slot -1 and are stored in page 0 (vLLM's kernels skip them)."""

    capabilities = DenseBackend.capabilities.with_changes(
        server={"padding_slots": {-1}},
        heads={"families": {"gqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        bounds={"max_context_len": 1 << 14},
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
        stored = replace(batch, out_cache_loc=batch.out_cache_loc.clamp(min=0))
        return super().forward(q, k, v, layer, stored, save_kv_cache)


@control("context-of-prefixes")
class DraftsBehindTheContext(ContextOfPrefixes):
    """Drafts of a request at the end of its context come after max_context_len (SGLang)."""
