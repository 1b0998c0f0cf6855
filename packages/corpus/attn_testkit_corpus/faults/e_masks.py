"""Class E: visibility: tree masks, causal masks, and the boundary between prefix and draft."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode, TreeMaskMode, VerifyInput, VerifyMask

from .catalogue import fault
from .dense import DenseBackend, Visibility

_VERIFY = (ForwardMode.TARGET_VERIFY,)
_CAUSAL = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
_EXTENDS = _VERIFY + _CAUSAL


@fault(
    "sglang guard in flashinfer_backend; flashinfer #1028",
    "buckets-independent matches-oracle",
    "no other mode and no eager step",
    modes="draft-extend draft-extend-v2",
    executions="graph",
)
class CustomMaskStaleWhenNone(DenseBackend):
    """The mask of a verified tree stays in force for later causal batches of the instance."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        bs, n = len(counts), self.context.num_draft_tokens
        causal = self.mask_buffer is None or not self.mask_buffer.fits(bs)
        if batch.forward_mode.is_target_verify() or causal or len(offset) != n:
            return position, key, visible
        assert self.mask_buffer is not None
        old = self.mask_buffer.buffer[: bs * n * n].view(bs, n, n)
        node = self.key - (self.kv_lens - counts)[:, None]
        mine = old.gather(2, node.clamp(0, n - 1)[:, None].expand(-1, n, -1))
        return position, key, visible & (mine | (node < 0)[:, None])


@fault(
    "sglang #32920, #32050",
    "completes output-contract",
    "mask",
    modes="target-verify",
    executions="graph",
    slug="tree-mask-buffer-disagreement",
)
class TreeMaskBufferTooSmall(DenseBackend):
    """The mask buffer is sized only from the prefix, without the draft columns that the tree kernel writes."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        n = self.context.num_draft_tokens
        buffer = torch.zeros(max_bs * n * (n - 1), dtype=torch.bool, device=self.context.device)
        self.mask_buffer = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)


@fault("sglang #39287", "matches-oracle", "window", modes="target-verify")
class WindowByFlatQueryIndex(DenseBackend):
    """The window of a draft node is counted from its index in the tree, though siblings have the same depth."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        visible = super().visibility(batch, counts, offset)[2]
        prefix = batch.seq_lens[: batch.batch_size, None]
        return prefix + offset, self.key[None, None], visible


@fault(
    "TensorRT-LLM #13426",
    "matches-oracle finite",
    "draft",
    modes="target-verify",
    slug="packed-mask-row-width-per-request",
    modelled="upstream later requests drift because widths differ; here all trees of a batch have one size and need "
    "two words",
)
class PackedMaskOneWord(DenseBackend):
    """A row of the packed mask is read as one 32-bit word, so nodes from 32 on are invisible."""

    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        return super().tree(spec, prefix, offset, node) & (node < 32)[:, None]


@fault(
    "sglang #32269", "completes captures-cleanly", "mask", modes="target-verify", slug="verify-mask-not-passed-to-xqa"
)
class VerifyMaskNotPassed(DenseBackend):
    """Verify is routed to a decode kernel that needs a mask for more than one row, and none is passed."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        mask = None
        if batch.forward_mode.is_target_verify() and len(offset) > 1 and mask is None:
            raise ValueError("mask is required for q_len > 1 on this kernel")
        return super().visibility(batch, counts, offset)


@fault("flashinfer #3871", "output-written", "never written", modes="target-verify draft-extend-v2")
class DecodePlanAssumesOneRow(DenseBackend):
    """The decode plan has one row per request, so only the first bs rows of the output are mapped and written."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        right = super().forward(q, k, v, layer, batch, save_kv_cache)
        out = torch.empty_like(right)
        out[: batch.batch_size] = right[: batch.batch_size]
        return out


@fault("flashinfer #3871", "matches-oracle", "visible", modes=_EXTENDS)
class DraftRowsNotCausal(DenseBackend):
    """The decode kernel has no mask inside the block of new rows: every row sees all of them."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        block = self.key < self.kv_lens[:, None, None]
        return position, key, block.expand_as(visible)


@fault("general", "matches-oracle", "tree mask", modes="target-verify", executions="eager")
class FullMaskOffsetOfEqualPrefixes(DenseBackend):
    """Request i's block of a FULL_MASK is found at i times the size of the first one."""

    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        assert spec.custom_mask is not None
        n, request = len(offset), torch.arange(len(prefix), device=prefix.device)[:, None]
        line = request * n * (prefix[0] + n) + offset * (prefix[:, None] + n) + prefix[:, None]
        at = line[..., None] + node[:, None]
        return spec.custom_mask[at.clamp(max=spec.custom_mask.numel() - 1)]


@fault("general", "matches-oracle", "mask", modes="target-verify", executions="eager")
class FullMaskRowWithoutDraftColumns(DenseBackend):
    """Rows of a FULL_MASK are assumed to be as wide as the prefix, without the draft columns after it."""

    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        assert spec.custom_mask is not None
        lens, n = prefix[:, None], len(offset)
        request = torch.arange(len(prefix), device=prefix.device)[:, None]
        line = (lens.cumsum(0) - lens) * n + request * n * n + offset * lens + lens
        return spec.custom_mask[line[..., None] + node[:, None]]


@fault("general", "matches-oracle", "mask", modes="target-verify")
class TreeMaskTransposed(DenseBackend):
    """Rows and columns of the tree mask are exchanged: a node sees its descendants."""

    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        square = super().tree(spec, prefix, offset, offset.expand(len(prefix), -1))
        return square.transpose(1, 2).gather(2, node[:, None].expand(-1, len(offset), -1))


@fault("general", "matches-oracle", "mask", modes="target-verify")
class TreeMaskOfRequestZero(DenseBackend):
    """Every request is masked with the tree of the first one."""

    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        square = super().tree(spec, prefix, offset, offset.expand(len(prefix), -1))[:1]
        return square.expand(len(prefix), -1, -1).gather(2, node[:, None].expand(-1, len(offset), -1))


@fault("general", "matches-oracle", "not ancestors are visible", modes="target-verify")
class TreeMaskByDepth(DenseBackend):
    """Visibility is rebuilt from positions: a node sees all nodes of smaller depth, not only its ancestors."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        above = (key < position[..., None]) & (self.key < self.kv_lens[:, None, None])
        return position, key, visible | above


@fault("general", "matches-oracle", "KV token", modes="target-verify")
class DraftNodeBlindToItself(DenseBackend):
    """The mask of ancestors is used without the diagonal: a node does not see its own key."""

    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        return super().tree(spec, prefix, offset, node) & (node[:, None] != offset[:, None])


@fault("general", "matches-oracle", "KV token", modes="target-verify")
class LastPrefixKeyMasked(DenseBackend):
    """The prefix is masked with < prefix - 1, so its last key is lost to every draft node."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        prefix = batch.seq_lens[: batch.batch_size, None, None]
        return position, key, visible & (self.key != prefix - 1)


@fault("general", "matches-oracle", "later tokens are visible", modes="draft-extend draft-extend-v2")
class CausalOffByOne(DenseBackend):
    """The causal bound is <= position + 1, so every row but the last sees the next token."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, _ = super().visibility(batch, counts, offset)
        lens = self.kv_lens[:, None, None]
        return position, key, (self.key <= position[..., None] + 1) & (self.key < lens)


@fault(
    "flash-attention 2.1 (change of convention)",
    "matches-oracle",
    "as if there were no prefix",
    modes="draft-extend draft-extend-v2",
)
class CausalAlignedToTheStart(DenseBackend):
    """The causal mask is aligned to the first key, not to the last: row j sees keys 0 .. j and no prefix."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        return position, key, visible & (self.key <= offset[:, None])


@fault("rtp-llm 6b88d7528", "matches-oracle reads-own-kv", "every request has", modes="draft-extend")
class CausalFromPaddedWidth(DenseBackend):
    """Rows are aligned to the end of the widest request's rows, so the mask of shorter requests is shifted."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        shifted = position - (len(offset) - counts[:, None])
        return position, key, visible & (self.key <= shifted[..., None])


@fault("general", "matches-oracle", "mask", modes="target-verify", slug="mask-takes-uint8-for-bits")
class MaskTakesBytesForBits(DenseBackend):
    """The mask is read as packed bits although it holds one byte per element."""

    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        assert spec.custom_mask is not None
        at = torch.arange(spec.custom_mask.numel(), device=prefix.device)
        bits = spec.custom_mask.view(torch.uint8)[at // 8].bitwise_right_shift((at % 8).to(torch.uint8)) & 1
        return super().tree(replace(spec, custom_mask=bits.bool()), prefix, offset, node)


@fault("flash-attention #436", "matches-oracle", "later tokens are visible", modes="draft-extend draft-extend-v2")
class CausalMaskInLastBlockAlone(DenseBackend):
    """Only the last block of 64 keys is masked causally, but the new rows may be in two blocks."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        last = (self.kv_lens - 1).clamp(min=0)[:, None, None] // 64 * 64
        return position, key, visible | (key < last)


@fault(
    "vLLM #51902; general (packed heads of a group)",
    "matches-oracle",
    "what its first one should",
    modes="draft-extend draft-extend-v2",
)
class CausalBoundOfRowTile(DenseBackend):
    """Rows times heads of a group are processed in tiles of 64, and a later tile counts rows from its own first row."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        rows = max(1, 64 // self.context.layers[0].q_per_kv)
        return position, key, visible & (key <= (position - offset // rows * rows)[..., None])
