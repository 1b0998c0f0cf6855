"""Class M: which rows, positions and slots belong to which request and draft node."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..backends.torch_native import TorchNativeBackend
from ..contract import AttentionLayer, DraftExtendInput, ForwardBatch, ForwardMode
from .catalogue import fault

_VERIFY = (ForwardMode.TARGET_VERIFY,)
_V1 = (ForwardMode.DRAFT_EXTEND,)
_V2 = (ForwardMode.DRAFT_EXTEND_V2,)


@fault(
    slug="v1-rows-at-uniform-stride",
    bug_class="M",
    source="sglang #26019 (review)",
    modes=_V1,
    mechanism="request i's rows are looked for at i * (S + 1), although accepted rows are packed",
    promises=("matches-oracle",),
    hint="running sum|packed|request 0 is right",
)
class V1RowsAtUniformStride(TorchNativeBackend):
    def _row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(counts), device=counts.device) * (self.context.speculative_num_steps + 1)


@fault(
    slug="v1-counts-without-the-bonus-token",
    bug_class="M",
    source="general",
    modes=_V1,
    mechanism="rows of a request are num_correct_drafts, which leaves the bonus token out, not num_accept_tokens",
    promises=("matches-oracle",),
    hint="request|row",
)
class V1CountsWithoutBonus(TorchNativeBackend):
    def _rows_of_requests(self, batch: ForwardBatch) -> tuple[int, torch.Tensor]:
        assert isinstance(batch.spec_info, DraftExtendInput)
        width, counts = super()._rows_of_requests(batch)
        return width, batch.spec_info.num_correct_drafts[: len(counts)].long().clamp(min=1)


@fault(
    slug="v1-prefix-from-the-full-width",
    bug_class="M",
    source="general",
    modes=_V1,
    mechanism="the prefix is taken as seq_lens - (S + 1), whatever was accepted, so the causal bound is shifted",
    promises=("matches-oracle", "finite"),
    hint="missing|shifted",
)
class V1PrefixFromFullWidth(TorchNativeBackend):
    def _visibility(
        self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super()._visibility(batch, torch.full_like(counts, len(offset)), offset)


@fault(
    slug="v1-length-at-full-width",
    bug_class="M",
    source="general",
    modes=_V1,
    mechanism="keys are prefix + S + 1 for every request, rejected tokens included",
    promises=("reads-own-kv",),
    hint="behind|stale|unowned|others",
)
class V1LengthAtFullWidth(TorchNativeBackend):
    def _kv_lens(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return super()._kv_lens(batch, counts) - counts + self.context.speculative_num_steps + 1


@fault(
    slug="v2-rows-counted-by-accepted",
    bug_class="M",
    source="sglang #21987",
    modes=_V2,
    mechanism="v2 has N rows a request, accepted or not, and they are taken for packed accepted ones",
    promises=("matches-oracle", "padding-inert", "replay-follows-batch"),
    hint="request|row",
)
class V2RowsCountedByAccepted(TorchNativeBackend):
    def _row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        return self._accepted.cumsum(0) - self._accepted

    def _rows_of_requests(self, batch: ForwardBatch) -> tuple[int, torch.Tensor]:
        assert isinstance(batch.spec_info, DraftExtendInput)
        self._accepted = batch.spec_info.num_accept_tokens[: batch.batch_size].long()
        return super()._rows_of_requests(batch)


@fault(
    slug="v2-causal-over-accepted-rows",
    bug_class="M",
    source="general",
    modes=_V2,
    mechanism="the causal bound of v2 is aligned to the last accepted row, not to the last row",
    promises=("matches-oracle", "reads-own-kv"),
    hint="visible|shifted|read",
)
class V2CausalOverAcceptedRows(TorchNativeBackend):
    def _visibility(
        self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert isinstance(batch.spec_info, DraftExtendInput)
        accepted = batch.spec_info.num_accept_tokens[: len(counts)].long()
        position, key, _ = super()._visibility(batch, counts, offset)
        moved = position + (counts - accepted)[:, None]
        return moved, key, (key <= moved[..., None]) & (key < self._kv_lens(batch, counts)[:, None, None])


@fault(
    slug="verify-length-taken-for-total",
    bug_class="M",
    source="general",
    modes=_VERIFY,
    mechanism="seq_lens of verify is taken for prefix + N, so the draft block lies over the end of the prefix",
    promises=("matches-oracle",),
    hint="KV token",
)
class VerifyLengthTakenForTotal(TorchNativeBackend):
    def _kv_lens(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return batch.seq_lens[: batch.batch_size]


@fault(
    slug="verify-length-from-depth",
    bug_class="M",
    source="general",
    modes=_VERIFY,
    mechanism="the number of keys is the largest position + 1, which counts a tree's depth and not its nodes",
    promises=("matches-oracle",),
    hint="draft nodes",
)
class VerifyLengthFromDepth(TorchNativeBackend):
    def _visibility(
        self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        position, key, visible = super()._visibility(batch, counts, offset)
        return position, key, visible & (self._key <= position.amax(1)[:, None, None])


@fault(
    slug="siblings-share-a-slot",
    bug_class="M",
    source="sglang #15360, #26866",
    modes=_VERIFY,
    mechanism="draft K and V are stored by position, so siblings of a tree overwrite each other",
    promises=("writes-own-kv",),
    hint="it holds the row of the new token|not written",
    modelled="upstream accepted tokens of a tree are taken for a dense prefix when their KV is moved",
)
class SiblingsShareASlot(TorchNativeBackend):
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        position = batch.positions[: batch.batch_size * len(self._slots[0])].view(batch.batch_size, -1)
        batch = replace(batch, out_cache_loc=self._slots.gather(1, position).view(-1))
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@fault(
    slug="tree-width-from-topk",
    bug_class="M",
    source="sglang #27545",
    modes=_VERIFY,
    executions=("eager",),
    mechanism="rows a request are taken as steps + 1, which is the tree's size for chains alone",
    promises=("matches-oracle", "completes"),
    hint="row|request|tree",
)
class TreeWidthFromSteps(TorchNativeBackend):
    def _row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(counts), device=counts.device) * (self.context.speculative_num_steps + 1)
