"""Class E: who may see whom: tree masks, causal masks, and the boundary between prefix and draft."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..backends.torch_native import TorchNativeBackend
from ..contract import AttentionLayer, ForwardBatch, ForwardMode, TreeMaskMode, VerifyInput, VerifyMask
from .catalogue import fault

_VERIFY = (ForwardMode.TARGET_VERIFY,)
_CAUSAL = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
_EXTENDS = _VERIFY + _CAUSAL
_Visibility = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@fault(
    slug="custom-mask-stale-when-none",
    bug_class="E",
    source="sglang guard in flashinfer_backend; flashinfer #1028",
    modes=_CAUSAL,
    executions=("graph",),
    mechanism="once the instance has verified a tree, the mask of that tree stays in force for causal batches",
    promises=("buckets-independent", "matches-oracle"),
    hint="alone",
)
class CustomMaskStaleWhenNone(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        position, key, visible = super()._visibility(batch, counts, offset)
        bs, n = len(counts), self.context.num_draft_tokens
        causal = self._mask is None or not self._mask.fits(bs)
        if batch.forward_mode.is_target_verify() or causal or len(offset) != n:
            return position, key, visible
        assert self._mask is not None
        old = self._mask.buffer[: bs * n * n].view(bs, n, n)
        node = self._key - (self._kv_lens(batch, counts) - counts)[:, None]
        mine = old.gather(2, node.clamp(0, n - 1)[:, None].expand(-1, n, -1))
        return position, key, visible & (mine | (node < 0)[:, None])


@fault(
    slug="tree-mask-buffer-disagreement",
    bug_class="E",
    source="sglang #32920, #32050",
    modes=_VERIFY,
    executions=("graph",),
    mechanism="the mask buffer is sized from the prefix alone, without the draft columns that the tree kernel writes",
    promises=("completes", "output-contract"),
    hint="mask",
)
class TreeMaskBufferTooSmall(TorchNativeBackend):
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        n = self.context.num_draft_tokens
        buffer = torch.zeros(max_bs * n * (n - 1), dtype=torch.bool, device=self.context.device)
        self._mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)


@fault(
    slug="window-by-flat-query-index",
    bug_class="E",
    source="sglang #39287",
    modes=_VERIFY,
    mechanism="the window of a draft node is counted from its index in the tree, though siblings stand at one depth",
    promises=("matches-oracle",),
    hint="window",
)
class WindowByFlatQueryIndex(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        visible = super()._visibility(batch, counts, offset)[2]
        prefix = batch.seq_lens[: batch.batch_size, None]
        return prefix + offset, self._key[None, None], visible


@fault(
    slug="packed-mask-row-width-per-request",
    bug_class="E",
    source="TensorRT-LLM #13426",
    modes=_VERIFY,
    mechanism="a row of the packed mask is taken for one 32-bit word, and nodes from 32 on for invisible",
    promises=("matches-oracle", "finite"),
    hint="draft",
    modelled="upstream later requests drift because widths differ; here all trees of a batch have one size and need "
    "two words",
)
class PackedMaskOneWord(TorchNativeBackend):
    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        return super()._tree(spec, prefix, offset, node) & (node < 32)[:, None]


@fault(
    slug="verify-mask-not-passed-to-xqa",
    bug_class="E",
    source="sglang #32269",
    modes=_VERIFY,
    mechanism="verify is routed to a decode kernel that needs a mask for more than one row, and none is passed",
    promises=("completes", "captures-cleanly"),
    hint="mask",
)
class VerifyMaskNotPassed(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        mask = None
        if batch.forward_mode.is_target_verify() and len(offset) > 1 and mask is None:
            raise ValueError("mask is required for q_len > 1 on this kernel")
        return super()._visibility(batch, counts, offset)


@fault(
    slug="decode-plan-assumes-one-row",
    bug_class="E",
    source="flashinfer #3871",
    modes=(ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2),
    mechanism="the decode plan has one row a request, so only the first bs rows of the output are mapped and written",
    promises=("output-written",),
    hint="never written",
)
class DecodePlanAssumesOneRow(TorchNativeBackend):
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


@fault(
    slug="draft-rows-not-causal",
    bug_class="E",
    source="flashinfer #3871",
    modes=_EXTENDS,
    mechanism="the decode kernel has no mask inside the block of new rows: every row sees all of them",
    promises=("matches-oracle",),
    hint="visible",
)
class DraftRowsNotCausal(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        position, key, visible = super()._visibility(batch, counts, offset)
        block = self._key < self._kv_lens(batch, counts)[:, None, None]
        return position, key, block.expand_as(visible)


@fault(
    slug="full-mask-offset-of-equal-prefixes",
    bug_class="E",
    source="general",
    modes=_VERIFY,
    executions=("eager",),
    mechanism="request i's block of a FULL_MASK is found at i times the size of the first one",
    promises=("matches-oracle",),
    hint="tree mask",
)
class FullMaskOffsetOfEqualPrefixes(TorchNativeBackend):
    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        assert spec.custom_mask is not None
        n, request = len(offset), torch.arange(len(prefix), device=prefix.device)[:, None]
        line = request * n * (prefix[0] + n) + offset * (prefix[:, None] + n) + prefix[:, None]
        at = line[..., None] + node[:, None]
        return spec.custom_mask[at.clamp(max=spec.custom_mask.numel() - 1)]


@fault(
    slug="full-mask-row-without-draft-columns",
    bug_class="E",
    source="general",
    modes=_VERIFY,
    executions=("eager",),
    mechanism="rows of a FULL_MASK are taken to be as wide as the prefix, without the draft columns behind it",
    promises=("matches-oracle",),
    hint="mask",
)
class FullMaskRowWithoutDraftColumns(TorchNativeBackend):
    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        assert spec.custom_mask is not None
        lens, n = prefix[:, None], len(offset)
        request = torch.arange(len(prefix), device=prefix.device)[:, None]
        line = (lens.cumsum(0) - lens) * n + request * n * n + offset * lens + lens
        return spec.custom_mask[line[..., None] + node[:, None]]


@fault(
    slug="tree-mask-transposed",
    bug_class="E",
    source="general",
    modes=_VERIFY,
    mechanism="rows and columns of the tree mask are exchanged: a node sees its descendants",
    promises=("matches-oracle",),
    hint="mask",
)
class TreeMaskTransposed(TorchNativeBackend):
    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        square = super()._tree(spec, prefix, offset, offset.expand(len(prefix), -1))
        return square.transpose(1, 2).gather(2, node[:, None].expand(-1, len(offset), -1))


@fault(
    slug="tree-mask-of-request-zero",
    bug_class="E",
    source="general",
    modes=_VERIFY,
    mechanism="every request is masked with the tree of the first one",
    promises=("matches-oracle",),
    hint="mask",
)
class TreeMaskOfRequestZero(TorchNativeBackend):
    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        square = super()._tree(spec, prefix, offset, offset.expand(len(prefix), -1))[:1]
        return square.expand(len(prefix), -1, -1).gather(2, node[:, None].expand(-1, len(offset), -1))


@fault(
    slug="tree-mask-by-depth",
    bug_class="E",
    source="general",
    modes=_VERIFY,
    mechanism="visibility is rebuilt from positions: a node sees all nodes that stand above it, not its ancestors "
    "alone",
    promises=("matches-oracle",),
    hint="no ancestors are visible",
)
class TreeMaskByDepth(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        position, key, visible = super()._visibility(batch, counts, offset)
        above = (key < position[..., None]) & (self._key < self._kv_lens(batch, counts)[:, None, None])
        return position, key, visible | above


@fault(
    slug="draft-node-blind-to-itself",
    bug_class="E",
    source="general",
    modes=_VERIFY,
    mechanism="the mask of ancestors is used without the diagonal: a node does not see its own key",
    promises=("matches-oracle",),
    hint="KV token",
)
class DraftNodeBlindToItself(TorchNativeBackend):
    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        return super()._tree(spec, prefix, offset, node) & (node[:, None] != offset[:, None])


@fault(
    slug="last-prefix-key-masked",
    bug_class="E",
    source="general",
    modes=_VERIFY,
    mechanism="the prefix is masked with < prefix - 1, so its last key is lost to every draft node",
    promises=("matches-oracle",),
    hint="KV token",
)
class LastPrefixKeyMasked(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        position, key, visible = super()._visibility(batch, counts, offset)
        prefix = batch.seq_lens[: batch.batch_size, None, None]
        return position, key, visible & (self._key != prefix - 1)


@fault(
    slug="causal-off-by-one",
    bug_class="E",
    source="general",
    modes=_CAUSAL,
    mechanism="the causal bound is <= position + 1: every row but the last sees the next token",
    promises=("matches-oracle",),
    hint="later tokens are visible",
)
class CausalOffByOne(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        position, key, _ = super()._visibility(batch, counts, offset)
        lens = self._kv_lens(batch, counts)[:, None, None]
        return position, key, (self._key <= position[..., None] + 1) & (self._key < lens)


@fault(
    slug="causal-aligned-to-the-start",
    bug_class="E",
    source="flash-attention 2.1 (change of convention)",
    modes=_CAUSAL,
    mechanism="the causal mask is aligned to the first key, not to the last: row j sees keys 0 .. j and no prefix",
    promises=("matches-oracle",),
    hint="missing",
)
class CausalAlignedToTheStart(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        position, key, visible = super()._visibility(batch, counts, offset)
        return position, key, visible & (self._key <= offset[:, None])


@fault(
    slug="causal-from-padded-width",
    bug_class="E",
    source="rtp-llm 6b88d7528",
    modes=(ForwardMode.DRAFT_EXTEND,),
    mechanism="rows are aligned to the end of the widest request's rows, so the mask of shorter requests is shifted",
    promises=("matches-oracle", "reads-own-kv"),
    hint="missing",
)
class CausalFromPaddedWidth(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        position, key, visible = super()._visibility(batch, counts, offset)
        shifted = position - (len(offset) - counts[:, None])
        return position, key, visible & (self._key <= shifted[..., None])


@fault(
    slug="mask-takes-uint8-for-bits",
    bug_class="E",
    source="general",
    modes=_VERIFY,
    mechanism="the mask is read as packed bits although it holds one byte a cell",
    promises=("matches-oracle",),
    hint="mask",
)
class MaskTakesBytesForBits(TorchNativeBackend):
    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        assert spec.custom_mask is not None
        at = torch.arange(spec.custom_mask.numel(), device=prefix.device)
        bits = spec.custom_mask.view(torch.uint8)[at // 8].bitwise_right_shift((at % 8).to(torch.uint8)) & 1
        return super()._tree(replace(spec, custom_mask=bits.bool()), prefix, offset, node)


@fault(
    slug="causal-mask-in-last-block-alone",
    bug_class="E",
    source="flash-attention #436",
    modes=_CAUSAL,
    mechanism="only the last block of 64 keys is masked causally, and the new rows may lie in two blocks",
    promises=("matches-oracle",),
    hint="later tokens are visible",
)
class CausalMaskInLastBlockAlone(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        position, key, visible = super()._visibility(batch, counts, offset)
        last = (self._kv_lens(batch, counts) - 1).clamp(min=0)[:, None, None] // 64 * 64
        return position, key, visible | (key < last)


@fault(
    slug="causal-bound-of-row-tile",
    bug_class="E",
    source="vLLM #51902; general (packed heads of a group)",
    modes=_CAUSAL,
    mechanism="rows times heads of a group go in tiles of 64, and a later tile counts its rows from its own first one",
    promises=("matches-oracle",),
    hint="missing",
)
class CausalBoundOfRowTile(TorchNativeBackend):
    def _visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> _Visibility:
        position, key, visible = super()._visibility(batch, counts, offset)
        rows = max(1, 64 // self.context.layers[0].q_per_kv)
        return position, key, visible & (key <= (position - offset // rows * rows)[..., None])
