"""Class H: empty KV splits, the combination of partial results, NaN in unowned slots."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .builds import CascadeBackend
from .catalogue import fault
from .dense import DenseBackend, Visibility
from .parent import Metadata, PlannedBackend

_EXTENDS = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)


@fault(
    "flash-attention 26d7d92f",
    "finite matches-oracle",
    "nan",
    modelled="a window empties the first splits, where upstream a row had no keys at all",
)
class CombineAllMinusInf(PlannedBackend):
    """Partial results are merged one after the other, and merging two empty ones computes -inf minus -inf."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        out, running = acc[:, 0], lse[:, 0]
        for split in range(1, self.max_splits):
            top = torch.maximum(running, lse[:, split])
            old, new = torch.exp(running - top), torch.exp(lse[:, split] - top)
            out = (out * old[..., None] + acc[:, split] * new[..., None]) / (old + new)[..., None]
            running = top + (old + new).log()
        return out if layer.sinks is None else out * torch.sigmoid(running - layer.sinks)[..., None]


@fault(
    "aiter #4117, #3641",
    "finite repeatable matches-oracle replay-follows-batch",
    "partial results of empty splits",
    slug="uniform-splits-give-empty-splits",
)
class EmptySplitsNotWritten(PlannedBackend):
    """Every request gets all splits; those without keys write nothing, and the combine reads old contents of the
    workspace.
    """

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        before, empty = (acc.clone(), lse.clone()), ~seen.any(-1)[..., None]
        super().partials(logits, seen, values, acc, lse)
        acc.copy_(torch.where(empty[..., None], before[0], acc))
        lse.copy_(torch.where(empty, before[1], lse))


@fault("lmdeploy #788; flash-attention a3a257c7", "output-written finite", "never written")
class EarlyExitWithoutWriting(PlannedBackend):
    """The kernel returns early when there is no context before the step's tokens, and writes no output."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        right = super().attend(q, layer, meta)
        row = torch.searchsorted(meta.cu_seqlens_q[1:].long(), self.index[: len(q)], right=True)
        context = (meta.kv_lens - meta.cu_seqlens_q.diff())[row.clamp(max=len(meta.kv_lens) - 1)]
        return torch.where((context > 0)[:, None, None], right, torch.empty_like(right))


@fault(
    "sglang #22688, #22291; flashinfer #3047, #3779", "matches-oracle", "weights", slug="zero-kv-rows-in-chunk-merge"
)
class EmptyChunkKeepsThePrevious(PlannedBackend):
    """Shorter requests have no keys in later chunks, and the kernel leaves the previous chunk's result to the merge."""

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        super().partials(logits, seen, values, acc, lse)
        empty = ~seen.any(-1)[..., None]
        for split in range(1, self.max_splits):
            acc[:, split] = torch.where(empty[:, split, ..., None], acc[:, split - 1], acc[:, split])
            lse[:, split] = torch.where(empty[:, split], lse[:, split - 1], lse[:, split])


@fault("flashinfer #353, #363, #440, #868", "matches-oracle", "weights", slug="empty-kv-modes-disagree")
class EmptyPartHasLseZero(PlannedBackend):
    """A split without keys has a log-sum-exp of 0 instead of -inf, so it gets weight in the merge."""

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        super().partials(logits, seen, values, acc, lse)
        lse.masked_fill_(lse == -torch.inf, 0.0)


@fault("flashinfer #1206", "matches-oracle reads-own-kv", "more than once")
class ChunkNotMultipleOfTile(PlannedBackend):
    """A split's length is not a multiple of the tile, and the lanes of its last tile past the end are not masked."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return (lens + self.max_splits - 1) // self.max_splits

    def in_split(self, meta: Metadata) -> torch.Tensor:
        chunk = meta.chunk.long()[:, None, None].clamp(min=1)
        key, split = self.index[: self.pages * self.context.page_size], self.index[: self.max_splits, None]
        end = split * chunk + (chunk + self.tile - 1) // self.tile * self.tile
        return (key >= split * chunk) & (key < end)


@fault(
    "vLLM #35219, #47574; flash-attention #1745",
    "reads-own-kv",
    r"0 \* NaN is NaN",
    slug="recycled-block-bytes-decode-to-nan",
)
class ZeroTimesNan(PlannedBackend):
    """Slots after the last key are loaded and multiplied by a weight of 0, so NaN in them reaches the result."""

    def mask_values(self, values: torch.Tensor, seen: torch.Tensor, meta: Metadata) -> torch.Tensor:
        return values


@fault(
    "aiter #4245; sglang comments in aiter_backend",
    "reads-own-kv padding-inert",
    r"0 \* NaN is NaN",
    slug="oob-page-id-folds-to-slot0",
)
class TailPagesFoldToPageZero(PlannedBackend):
    """Page ids after a request's own resolve to page 0, which holds NaN of padding and is loaded with a weight of 0."""

    def key_slots(self, meta: Metadata) -> torch.Tensor:
        slots = super().key_slots(meta)
        return torch.where(self.index[: slots.shape[1]] < meta.kv_lens[:, None], slots, 0)

    def mask_values(self, values: torch.Tensor, seen: torch.Tensor, meta: Metadata) -> torch.Tensor:
        return values


@fault(
    "flashinfer #3393",
    "matches-oracle finite",
    "share state that each needs",
    modes=_EXTENDS,
    modelled="all rows find the statistics of the last row",
)
class PartialStatsCollide(PlannedBackend):
    """Offsets of the partial statistics count CTAs, not tokens: the rows of a request overwrite each other's."""

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        super().partials(logits, seen, values, acc, lse)
        lse.copy_(lse[:, :, -1:].clone().expand_as(lse))


@fault(
    "flash-attention #2550",
    "matches-oracle",
    "later splits or tiles",
    modes=_EXTENDS,
    slug="varlen-paged-takes-split-path",
)
class VarlenTakesSplitPath(PlannedBackend):
    """Splits are set up for several query rows, whose kernel does not combine: only the first split is returned."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().combine(acc[:, :1], lse[:, :1], layer)


@fault("general", "matches-oracle", "left out")
class LastKeysInNoSplit(PlannedBackend):
    """Keys in one split are len // splits rounded down, so the last keys belong to none."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return (lens // (self.max_splits * self.tile) * self.tile).clamp(min=self.tile)


@fault("general", "matches-oracle", "weights")
class SplitsAveraged(PlannedBackend):
    """Partial results are averaged over the splits that have keys, without their log-sum-exps."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().combine(acc, torch.where(lse == -torch.inf, lse, 0.0), layer)


@fault("general", "finite matches-oracle", "near -6e4")
class CombineWithoutMaximum(PlannedBackend):
    """The combine takes exp of log-sum-exps without their maximum: 0 / 0 or inf / inf far from zero."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        weight = torch.exp(lse)
        total = weight.sum(1) + (0.0 if layer.sinks is None else torch.exp(layer.sinks))
        return (acc * weight[..., None]).sum(1) / total[..., None]


@fault("general", "matches-oracle", "weights")
class PartialResultsInBf16(PlannedBackend):
    """Partial results are kept in bfloat16, whatever the model's dtype."""

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        super().partials(logits, seen, values, acc, lse)
        acc.copy_(acc.bfloat16())


@fault("general", "reads-own-kv", "added mask")
class MaskIsAdded(DenseBackend):
    """The mask is added to the logits as 0 or -inf: NaN from an unowned slot stays NaN."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        added = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -torch.inf)
        return super().weights(logits + added[:, None, None], torch.ones_like(seen), layer)


@fault("sglang #22688", "reads-own-kv matches-oracle", "are read")
class LongestRequestSetsTheLoop(DenseBackend):
    """The loop over keys runs to the longest request, and shorter ones read past their end."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        behind = (self.key >= self.kv_lens[:, None]) & (self.key < self.kv_lens.amax())
        return position, key, visible | behind[:, None]


@fault("vLLM #22003", "matches-oracle")
class SharedPrefixLseTransposed(CascadeBackend):
    """The shared part's log-sum-exps are stored head by head, but the merge reads them row by row."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        part = lse[:, 0].flatten(0, 1)
        lse = lse.clone()
        lse[:, 0] = torch.where(self.common > 0, part.t().reshape(part.shape), part).view_as(lse[:, 0])
        return super().combine(acc, lse, layer)
