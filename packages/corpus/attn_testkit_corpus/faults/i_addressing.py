"""Class I: widths of addresses, strides, dtypes of indices."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, TreeMaskMode, VerifyInput

from .catalogue import fault
from .dense import DenseBackend
from .parent import PlannedBackend


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor``, as if it were contiguous."""
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * size)
    return tensor.as_strided(tensor.shape, strides)


def _in_32_bits(slots: torch.Tensor, context: BackendContext) -> torch.Tensor:
    """Slots that are addressed instead of ``slots`` if their product with the stride wraps."""
    stride = context.kv_pool.get_key_buffer(context.layers[0].layer_id).stride(0)
    return (slots.int() * stride).long() // stride % context.kv_pool.num_slots


@fault(
    "flashinfer #3136; vLLM #47671, #50427; lmdeploy #4494",
    "reads-own-kv matches-oracle",
    "page",
    slug="page-times-stride-32-bit",
    modelled="13 bits instead of 32",
)
class PageTimesStrideOverflows(DenseBackend):
    """Page id times page stride is computed in too narrow an integer, so high pages wrap to low ones."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, buffer = super().key_slots(batch), self.context.kv_pool.get_key_buffer(0)
        return (slots * buffer.stride(0) % (1 << 13)) // buffer.stride(0) % self.context.kv_pool.num_slots


@fault(
    "vLLM #47671, #50427; aiter #4474; tokenspeed #748",
    "reads-own-kv matches-oracle finite",
    "passes with a small KV pool",
    modes="decode extend",
    slug="slot-times-stride-in-32-bits",
)
class SlotTimesStrideIn32Bits(DenseBackend):
    """A slot times its stride is a product of 32-bit integers: beyond 2^31 elements it is negative."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return _in_32_bits(super().key_slots(batch), self.context)


@fault(
    "vllm-xpu-kernels #459", "reads-own-kv matches-oracle finite", "in 24 bits", modes="decode", slug="slot-in-24-bits"
)
class SlotIn24Bits(DenseBackend):
    """The row of a slot is a field of 24 bits: rows from 16,777,216 on wrap around."""

    capabilities = DenseBackend.capabilities.with_changes(
        heads={"families": {"gqa"}, "gqa_ratios": {2}, "head_dims": {64, 128}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}},
    )

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return super().key_slots(batch) & 0xFFFFFF


@fault(
    "tokenspeed #501, #748 (set_mla_kv_buffer)",
    "writes-own-kv",
    "elements beyond 2^31",
    modes="decode extend",
    slug="kv-store-offset-in-32-bits",
)
class KVStoreOffsetIn32Bits(PlannedBackend):
    """New rows go to a slot times its stride in 32-bit integers; rows beyond 2^31 elements are written elsewhere."""

    capabilities = PlannedBackend.capabilities.with_changes(heads={"families": {"gqa"}}, precision={"dtypes": {"bf16"}})

    def plan_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return _in_32_bits(super().plan_slots(batch), self.context)


@fault(
    "sglang comment in aiter_backend",
    "reads-own-kv matches-oracle",
    "page",
    modes="draft-extend",
    modelled="14 bits instead of 32",
)
class LengthDtypePicksAddressWidth(DenseBackend):
    """The kernel derives its address width from the dtype of the lengths, which is narrow in draft-extend."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, row = super().key_slots(batch), self.context.kv_pool.get_key_buffer(0).stride(0)
        return (slots * row % (1 << 14)) // row if batch.forward_mode.is_draft_extend() else slots


@fault(
    "aiter #3211",
    "reads-own-kv matches-oracle",
    "page",
    slug="block-id-16-bit-window",
    modelled="windows of 16 pages instead of 65536, groups of 8",
)
class BlockIdWindow(DenseBackend):
    """Page ids of one load group are assumed to share their high bits with the first one."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, page = super().key_slots(batch), self.context.page_size
        first = slots[:, self.key // (8 * page) * (8 * page)] // page
        return ((first & ~15) | (slots // page & 15)) % (self.context.kv_pool.num_slots // page) * page + slots % page


@fault("general", "reads-own-kv matches-oracle", "page", modes="decode")
class PageIdInSixteenBits(DenseBackend):
    """Page ids are stored in 16 bits."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, page = super().key_slots(batch), self.context.page_size
        return (slots // page & 0xFFFF) * page + slots % page


@fault("general", "matches-oracle", "16 bits", modes="decode")
class LengthInSixteenBits(DenseBackend):
    """The number of keys is passed to the kernel in 16 bits."""

    def kv_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return super().kv_lengths(batch, counts) & 0xFFFF


@fault(
    "vLLM #21133; flashinfer #1865; flash-attention #2670",
    "matches-oracle finite",
    "strides|k and v hold NaN",
    slug="query-or-output-stride-ignored",
)
class QueryStrideIgnored(DenseBackend):
    """q is a view of packed q, k, v, but is read as if it were contiguous."""

    def queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().queries(_dense(q), layer)


@fault("flashinfer #527; aiter #970", "writes-own-kv matches-oracle", "stride")
class AppendStrideIgnored(DenseBackend):
    """k is a view of packed q, k, v, but its rows are stored as if they were contiguous."""

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


@fault("flashinfer #1865", "output-written matches-oracle", "never written")
class OutputStrideFromV(DenseBackend):
    """The output is written with the head count of V, so heads are written to other rows."""

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


@fault("vLLM #32417", "completes", "stride", modes="decode", slug="degenerate-stride-size-one-dim")
class DegenerateStride(DenseBackend):
    """One row of packed q keeps the packed stride, .contiguous() does nothing, and the kernel's descriptor refuses
    it.
    """

    def queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        q = q.contiguous()
        if q.stride(0) != q.shape[1] * q.shape[2]:
            raise RuntimeError(f"tensor map: row stride {q.stride(0)} of q is not its width {q.shape[1] * q.shape[2]}")
        return super().queries(q, layer)


@fault(
    "flashinfer #2255; aiter #3793",
    "writes-own-kv matches-oracle",
    "was not written|wrong slot",
    slug="index-dtype-template-shared",
)
class LocationsReadAsInt32(DenseBackend):
    """One template dtype for two index tensors: int64 cache locations are read as int32."""

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
    "flashinfer #1290; flash-attention #2662",
    "matches-oracle",
    "tree mask",
    modes="target-verify",
    executions="eager",
    slug="mask-offset-int32",
    modelled="10 bits instead of 31",
)
class MaskOffsetOverflows(DenseBackend):
    """The offset of a row in the full mask, row times kv_len, overflows its integer."""

    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        assert spec.custom_mask is not None
        at = torch.arange(spec.custom_mask.numel(), device=prefix.device)
        if spec.tree_mask_mode is TreeMaskMode.FULL_MASK:
            spec = replace(spec, custom_mask=spec.custom_mask[at & 0x3FF])
        return super().tree(spec, prefix, offset, node)


@fault("general", "reads-own-kv matches-oracle", "page or slot", slug="kv-row-stride-from-q-heads")
class KvStrideFromQueryHeads(DenseBackend):
    """The stride of a KV slot is computed with the number of query heads."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return super().key_slots(batch) * self.context.layers[0].q_per_kv % self.context.kv_pool.num_slots
