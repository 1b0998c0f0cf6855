"""Class I: widths of addresses, strides, dtypes of indices."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..backends.torch_native import TorchNativeBackend
from ..contract import AttentionLayer, ForwardBatch, ForwardMode, TreeMaskMode, VerifyInput
from .catalogue import fault

_ALL = tuple(ForwardMode)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind ``tensor`` as if it were contiguous."""
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * size)
    return tensor.as_strided(tensor.shape, strides)


@fault(
    slug="page-times-stride-32-bit",
    bug_class="I",
    source="flashinfer #3136; vLLM #47671, #50427; lmdeploy #4494",
    modes=_ALL,
    mechanism="page id times page stride is computed in too narrow an integer, so high pages wrap to low ones",
    promises=("reads-own-kv", "matches-oracle"),
    hint="page",
    modelled="13 bits instead of 32",
)
class PageTimesStrideOverflows(TorchNativeBackend):
    def _key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, buffer = super()._key_slots(batch), self.context.kv_pool.get_key_buffer(0)
        return (slots * buffer.stride(0) % (1 << 13)) // buffer.stride(0) % self.context.kv_pool.num_slots


@fault(
    slug="length-dtype-picks-address-width",
    bug_class="I",
    source="sglang comment in aiter_backend",
    modes=(ForwardMode.DRAFT_EXTEND,),
    mechanism="the kernel takes its address width from the dtype of the lengths, which draft-extend gives in a "
    "narrow one",
    promises=("reads-own-kv", "matches-oracle"),
    hint="page",
    modelled="14 bits instead of 32",
)
class LengthDtypePicksAddressWidth(TorchNativeBackend):
    def _key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, row = super()._key_slots(batch), self.context.kv_pool.get_key_buffer(0).stride(0)
        return (slots * row % (1 << 14)) // row if batch.forward_mode.is_draft_extend() else slots


@fault(
    slug="block-id-16-bit-window",
    bug_class="I",
    source="aiter #3211",
    modes=_ALL,
    mechanism="page ids of one load group are assumed to share their high bits with the first one",
    promises=("reads-own-kv", "matches-oracle"),
    hint="page",
    modelled="windows of 16 pages instead of 65536, groups of 8",
)
class BlockIdWindow(TorchNativeBackend):
    def _key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, page = super()._key_slots(batch), self.context.page_size
        first = slots[:, self._key // (8 * page) * (8 * page)] // page
        return ((first & ~15) | (slots // page & 15)) % (self.context.kv_pool.num_slots // page) * page + slots % page


@fault(
    slug="page-id-in-sixteen-bits",
    bug_class="I",
    source="general",
    modes=(ForwardMode.DECODE,),
    mechanism="page ids are stored in 16 bits",
    promises=("reads-own-kv", "matches-oracle"),
    hint="page",
)
class PageIdInSixteenBits(TorchNativeBackend):
    def _key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, page = super()._key_slots(batch), self.context.page_size
        return (slots // page & 0xFFFF) * page + slots % page


@fault(
    slug="length-in-sixteen-bits",
    bug_class="I",
    source="general",
    modes=(ForwardMode.DECODE,),
    mechanism="the number of keys is handed to the kernel in 16 bits",
    promises=("matches-oracle",),
    hint="16 bits",
)
class LengthInSixteenBits(TorchNativeBackend):
    def _kv_lens(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return super()._kv_lens(batch, counts) & 0xFFFF


@fault(
    slug="query-or-output-stride-ignored",
    bug_class="I",
    source="vLLM #21133; flashinfer #1865; flash-attention #2670",
    modes=_ALL,
    mechanism="q is a view of packed q, k, v, and is read as if it were contiguous",
    promises=("matches-oracle", "finite"),
    hint="strides|k and v hold NaN",
)
class QueryStrideIgnored(TorchNativeBackend):
    def _queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super()._queries(_dense(q), layer)


@fault(
    slug="append-stride-ignored",
    bug_class="I",
    source="flashinfer #527; aiter #970",
    modes=_ALL,
    mechanism="k is a view of packed q, k, v, and its rows are stored as if they were contiguous",
    promises=("writes-own-kv", "matches-oracle"),
    hint="stride",
)
class AppendStrideIgnored(TorchNativeBackend):
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return super().forward(q, _dense(k), v, layer, batch, save_kv_cache)


@fault(
    slug="output-stride-from-v",
    bug_class="I",
    source="flashinfer #1865",
    modes=_ALL,
    mechanism="the output is written with the head count of V, so heads land in other rows",
    promises=("output-written", "matches-oracle"),
    hint="never written",
)
class OutputStrideFromV(TorchNativeBackend):
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        written, kv = torch.empty_like(out).view(-1, layer.v_head_dim), layer.tp_v_head_num
        at = torch.arange(len(out), device=q.device)[:, None] * kv + torch.arange(out.shape[1], device=q.device)
        written[at.reshape(-1)] = out.reshape(-1, layer.v_head_dim)
        return written.view_as(out)


@fault(
    slug="degenerate-stride-size-one-dim",
    bug_class="I",
    source="vLLM #32417",
    modes=(ForwardMode.DECODE,),
    mechanism="one row of packed q keeps the packed stride, .contiguous() does nothing, and the kernel's descriptor "
    "refuses it",
    promises=("completes",),
    hint="stride",
)
class DegenerateStride(TorchNativeBackend):
    def _queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        q = q.contiguous()
        if q.stride(0) != q.shape[1] * q.shape[2]:
            raise RuntimeError(f"tensor map: row stride {q.stride(0)} of q is not its width {q.shape[1] * q.shape[2]}")
        return super()._queries(q, layer)


@fault(
    slug="index-dtype-template-shared",
    bug_class="I",
    source="flashinfer #2255; aiter #3793",
    modes=_ALL,
    mechanism="one template dtype for two index tensors: int64 cache locations are read as int32",
    promises=("writes-own-kv", "matches-oracle"),
    hint="was not written|wrong slot",
)
class LocationsReadAsInt32(TorchNativeBackend):
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        locations = batch.out_cache_loc.contiguous().view(torch.int32)[: len(batch.out_cache_loc)].long()
        if save_kv_cache:
            self.context.kv_pool.set_kv_buffer(layer, locations, k, v)
        return super().forward(q, k, v, layer, batch, save_kv_cache=False)


@fault(
    slug="mask-offset-int32",
    bug_class="I",
    source="flashinfer #1290; flash-attention #2662",
    modes=(ForwardMode.TARGET_VERIFY,),
    executions=("eager",),
    mechanism="the offset of a row in the full mask, row times kv_len, overflows its integer",
    promises=("matches-oracle",),
    hint="tree mask",
    modelled="10 bits instead of 31",
)
class MaskOffsetOverflows(TorchNativeBackend):
    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        assert spec.custom_mask is not None
        at = torch.arange(spec.custom_mask.numel(), device=prefix.device)
        if spec.tree_mask_mode is TreeMaskMode.FULL_MASK:
            spec = replace(spec, custom_mask=spec.custom_mask[at & 0x3FF])
        return super()._tree(spec, prefix, offset, node)


@fault(
    slug="kv-row-stride-from-q-heads",
    bug_class="I",
    source="general",
    modes=_ALL,
    mechanism="the stride of a KV slot is computed with the number of query heads",
    promises=("reads-own-kv", "matches-oracle"),
    hint="page or slot",
)
class KvStrideFromQueryHeads(TorchNativeBackend):
    def _key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return super()._key_slots(batch) * self.context.layers[0].q_per_kv % self.context.kv_pool.num_slots
