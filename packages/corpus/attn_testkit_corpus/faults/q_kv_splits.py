"""Class Q: log-sum-exps, KV splits, and their merged results."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, LogSumExp

from .catalogue import fault
from .with_kv_splits import MODES, NATURAL, SplitKVBackend

_CHECKS = ("log-sum-exp", "matches-oracle")


@fault(
    "sglang #35045, #40903",
    _CHECKS,
    "it is in base 2, but base e is declared",
    modes=MODES,
    slug="lse-in-base-2-where-e-is-declared",
)
class LseInBase2(SplitKVBackend):
    """The log-sum-exp is in the kernel's base 2, but the caller treats it as a natural one."""

    def returned(self, lse: torch.Tensor) -> torch.Tensor:
        return lse / math.log(2)


@fault(
    "general; cute-dsl's MLA next to the other MLA kernels of flashinfer",
    _CHECKS,
    "it is in base e, but base 2 is declared",
    modes=MODES,
    slug="lse-natural-where-base-2-is-declared",
)
class LseNaturalForBase2(SplitKVBackend):
    """The log-sum-exp is natural, from another kernel of the same package, but base 2 is declared."""

    capabilities = SplitKVBackend.capabilities.with_changes(lse=replace(NATURAL, base="2", merges=False))


@fault("vLLM #22003", _CHECKS, "heads come before rows in its memory", modes=MODES)
class LseHeadsBeforeRows(SplitKVBackend):
    """The log-sum-exp is written head by head, but read as rows of heads."""

    def returned(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.t().contiguous().view(lse.shape)


@fault(
    "flashinfer #353, #363, #440, #868",
    _CHECKS,
    "a KV split without keys must have -inf",
    modes=MODES,
    slug="empty-part-has-lse-0",
)
class EmptyPartHasLseZero(SplitKVBackend):
    """A split without keys has a log-sum-exp of 0, which gets weight in a merge."""

    def log_sum_exp(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        lse = super().log_sum_exp(logits, layer)
        return torch.where(lse == -torch.inf, 0.0, lse)


@fault(
    "flashinfer #4401",
    _CHECKS,
    "a KV split without keys must have -inf",
    modes=MODES,
    slug="empty-part-has-a-finite-sentinel",
)
class EmptyPartHasSentinel(SplitKVBackend):
    """A split without keys gives the finite number of a masked logit, which is larger than real logits may be."""

    def log_sum_exp(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().log_sum_exp(logits, layer).clamp(min=-5e4)


@fault("sglang's trtllm_mla and xpu backends; flashinfer #4975", "log-sum-exp finite", r"0 \* NaN is NaN", modes=MODES)
class EmptyPartOutputIsNan(SplitKVBackend):
    """A rank that owns no key of a request divides 0 by 0, and returns a correct log-sum-exp of -inf."""

    def outputs(self, out: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return out.masked_fill(~seen.any(-1)[..., None, None, None], torch.nan)


@fault(
    "sglang #22688, #22291; flashinfer #3047, #3779",
    _CHECKS,
    "a KV split without keys must have -inf",
    modes=MODES,
    slug="empty-part-keeps-stale-statistics",
)
class EmptyPartKeepsStatistics(SplitKVBackend):
    """The kernel skips requests without keys in a split, so their statistics are those of the split before."""

    before: torch.Tensor | None = None

    def log_sum_exp(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        lse, before = super().log_sum_exp(logits, layer), self.before
        if before is not None and before.shape == lse.shape:
            lse = torch.where(lse == -torch.inf, before, lse)
        self.before = lse
        return lse

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.before = None
        super().init_forward_metadata_in_graph(batch)


@fault(
    "rocm-libraries #12229", _CHECKS, "the sink is counted once more", modes=MODES, slug="sink-counted-in-every-part"
)
class SinkInEveryPart(SplitKVBackend):
    """Each rank adds the sink to its own sum, so the merge counts it once per rank."""

    def layer_of_part(self, layer: AttentionLayer) -> AttentionLayer:
        return layer


@fault("general; kernels that apply sinks when they normalise", _CHECKS, "the sink is left out", modes=MODES)
class SinkMissingFromLse(SplitKVBackend):
    """The output is normalized with the sink, but the log-sum-exp does not include it."""

    def with_sinks(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return logits


@fault("general", _CHECKS, "its logits are not scaled", modes=MODES)
class LseOfUnscaledLogits(SplitKVBackend):
    """The scale is applied only in the exponent, and not to the maximum that the log-sum-exp adds."""

    def log_sum_exp(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if layer.logit_cap:
            return super().log_sum_exp(logits, layer)
        return super().log_sum_exp(logits / layer.scaling, layer)


@fault("general", _CHECKS, "it is only the row's maximum", modes=MODES)
class LseIsTheMaximum(SplitKVBackend):
    """The running maximum is stored where the log-sum-exp belongs."""

    def log_sum_exp(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return self.with_sinks(logits, layer).amax(-1)


@fault("flashinfer #58, #50", _CHECKS, "it is only the logarithm of the sum", modes=MODES)
class LseWithoutItsMaximum(SplitKVBackend):
    """The logarithm of the running sum is stored, and the maximum that it is relative to is not added."""

    def log_sum_exp(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        lse = super().log_sum_exp(logits, layer)
        return torch.where(lse == -torch.inf, lse, lse - self.with_sinks(logits, layer).amax(-1))


@fault("vLLM's triton_mla.py, which allocates it in q's dtype", _CHECKS, "rounded to bfloat16", modes=MODES)
class LseRoundedToBf16(SplitKVBackend):
    """The log-sum-exp is kept in the model's dtype before the merge, and near 8 it is off by up to 0.03."""

    def returned(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.bfloat16().float()


@fault(
    "vLLM's triton_mla.py, which allocates it in q's dtype",
    "output-contract",
    "expected as declared torch.float32",
    modes=MODES,
)
class LseDtypeOfQ(SplitKVBackend):
    """The log-sum-exp is allocated in q's dtype, but float32 is declared."""

    def returned(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.bfloat16()


@fault(
    "general; chunked prefix planned with the lengths of the whole step",
    _CHECKS,
    modes=MODES,
    slug="prefix-part-has-the-new-rows",
)
class PrefixPartHasNewRows(SplitKVBackend):
    """The prefix split is planned with lengths that include the step's own rows, which then count twice."""

    def held(self, prefix_lens: torch.Tensor) -> torch.Tensor:
        return super().held(self.kv_lens if self.part.kind == "prefix" else prefix_lens)


@fault(
    "general; vLLM's cp_kv_cache_interleave_size left at 1",
    _CHECKS,
    modes=MODES,
    slug="rank-by-token-where-pages-are-dealt",
)
class RankByToken(SplitKVBackend):
    """Ranks have every R-th page, but the kernel attends to every R-th token."""

    def held(self, prefix_lens: torch.Tensor) -> torch.Tensor:
        self.part = replace(self.part, interleave=1)
        return super().held(prefix_lens)


@fault(
    "general; sglang #27545 in parts",
    "log-sum-exp replay-follows-batch matches-oracle",
    modes=MODES,
    executions="graph",
)
class PrefixLensOfTheCapture(SplitKVBackend):
    """Lengths of the prefix split are computed outside the graph at its capture, and not at replays."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.fresh: torch.Tensor | None = None
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.fresh = None
        if in_capture:
            _, counts = self.rows_of_requests(batch)
            self.fresh = (self.kv_lengths(batch, counts) - counts).clamp(min=0)
            self.all_fresh = [*getattr(self, "all_fresh", []), self.fresh]

    def prefix_lens(self) -> torch.Tensor:
        return super().prefix_lens() if self.fresh is None else self.fresh


@fault(
    "flash-attention 26d7d92f; flashinfer #4975",
    "log-sum-exp finite matches-oracle",
    modes=MODES,
    slug="merge-of-two-empty-parts-is-nan",
)
class MergeOfEmptyPartsIsNan(SplitKVBackend):
    """Merging two empty splits computes -inf minus -inf, and the third does not repair it."""

    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        top = torch.maximum(lse_a, lse_b)
        weight_a, weight_b = self.weight(lse_a, top), self.weight(lse_b, top)
        total = weight_a + weight_b
        out = (weight_a[..., None] * out_a.float() + weight_b[..., None] * out_b.float()) / total[..., None]
        return out.to(out_a.dtype), self.merged_lse(top, total)


@fault("vLLM #39148", "log-sum-exp finite matches-oracle", modes=MODES, slug="merge-of-two-empty-ranks-is-nan")
class MergeOfEmptyRanksIsNan(MergeOfEmptyPartsIsNan):
    """Merging two empty ranks is NaN: a request of one page leaves all ranks but the first without keys."""

    capabilities = SplitKVBackend.capabilities.with_changes(lse=LogSumExp(base="e", pages=MODES, merges=True))


@fault("general", "log-sum-exp finite matches-oracle", modes=MODES)
class MergeWithoutMaximum(SplitKVBackend):
    """The merge takes the exponentials of bare log-sum-exps, which are 0 or infinite far from zero."""

    def weight(self, lse: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        return torch.exp(lse)

    def merged_lse(self, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total.log()


@fault("general", _CHECKS, "the merged result of merge_state", modes=MODES)
class MergedLseIsTheLarger(SplitKVBackend):
    """A merge returns the larger of both log-sum-exps, so a third result gets too much weight."""

    def merged_lse(self, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.where(total == 0, -torch.inf, top)


@fault("general; cp_kv_cache_interleave_size of vLLM", _CHECKS, modes=MODES)
class KeysAreDealtOneByOne(SplitKVBackend):
    """A rank attends to every second key, but it has every second page."""

    capabilities = SplitKVBackend.capabilities.with_changes(kv_pool={"page_sizes": {1, 16}})

    def held(self, prefix_lens: torch.Tensor) -> torch.Tensor:
        part = replace(self.part, interleave=1) if self.part.kind == "rank" else self.part
        return part.holds(self.key, prefix_lens[:, None])
