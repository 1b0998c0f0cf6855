"""Class I: layouts of the KV pool that a kernel or a cache writer misreads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_testkit.contract import AttentionLayer, KVLayer, KVPoolSpec

from .catalogue import fault, helper
from .parent import Metadata
from .pool_reads import read_at
from .strided import LEAN, StridedBackend, Views

_HINT = "the KV pool of this case has layout"
_READS = ("matches-oracle", "reads-own-kv")


def _page_stride_computed(view: torch.Tensor) -> torch.Tensor:
    """View whose page stride is that of the page's slots."""
    _, slot, head, dim = view.stride()
    return view.as_strided(view.shape, (view.shape[1] * slot, slot, head, dim))


def _dense(view: torch.Tensor) -> torch.Tensor:
    """The memory from the first element on, as if it were contiguous."""
    _, page_size, heads, dim = view.shape
    return view.as_strided(view.shape, (page_size * heads * dim, heads * dim, dim, 1))


@fault("aiter #3498; vLLM #37228, #37032", _READS, _HINT, slug="page-stride-from-slots-of-a-page")
class PageStrideFromSlots(StridedBackend):
    """The kernel computes a page's address from page size and slot stride, but K and V of a page share a block."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"nhd", "kv-in-block"}})

    def read_views(self, layer: AttentionLayer) -> Views:
        key, value = super().read_views(layer)
        return _page_stride_computed(key), _page_stride_computed(value)


@fault("vLLM #54877; vllm-ascend #9763", _READS, _HINT)
class PagePaddingForgotten(PageStrideFromSlots):
    """Pages are padded to the size that other layers have, and the kernel's page stride counts only the rows."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"padded-pages"}})


@fault("general; vLLM #37228", _READS, _HINT, slug="rows-of-k-and-v-taken-for-contiguous")
class RowsTakenForContiguous(StridedBackend):
    """K and V of a head share a row, but the kernel reads K as if rows of keys followed each other."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"nhd", "side-by-side"}})

    def read_views(self, layer: AttentionLayer) -> Views:
        key, value = super().read_views(layer)
        return _dense(key), _dense(value)


@fault("general", _READS, _HINT)
class HndReadAsNhd(RowsTakenForContiguous):
    """The pool has heads before slots, but the kernel was built for slots before heads."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"nhd", "hnd"}})


@fault("general", _READS)
class LayerOffsetForgotten(StridedBackend):
    """Layers share a block, but the kernel is given the block without the offset of its layer."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"nhd", "layers-in-block"}})

    def read_views(self, layer: AttentionLayer) -> Views:
        first = self.context.layers[0]
        return super().read_views(first if self.context.kv_pool.layout == "layers-in-block" else layer)


@fault("general", ("writes-own-kv", *_READS), "K instead of V", slug="halves-of-a-row-swapped")
class HalvesSwapped(StridedBackend):
    """Writer and kernel agree that V comes first in a row, but everyone else stores K first."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"nhd", "side-by-side"}})

    def read_views(self, layer: AttentionLayer) -> Views:
        key, value = super().read_views(layer)
        return (value, key) if self.context.kv_pool.layout == "side-by-side" else (key, value)

    def write_views(self, layer: AttentionLayer) -> Views:
        return self.read_views(layer)


@fault("aiter #3492; vLLM #45111", "writes-own-kv", "slot|K instead of V", slug="cache-writer-computes-the-page-stride")
class WriterComputesThePageStride(StridedBackend):
    """The kernel reads the page stride, but the cache writer computes it, so rows are stored in other pages."""

    capabilities = PageStrideFromSlots.capabilities

    def write_views(self, layer: AttentionLayer) -> Views:
        key, value = super().write_views(layer)
        return _page_stride_computed(key), _page_stride_computed(value)


@fault(
    "LMCache #3214 (review); vllm-ascend #16706 (review)",
    "writes-own-kv",
    "was not written",
    slug="cache-written-to-a-reshaped-copy",
)
class WrittenToAReshapedCopy(StridedBackend):
    """The writer needs pages in one dimension and reshapes them, which copies if layers share a block."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"nhd", "layers-in-block"}})

    def write_views(self, layer: AttentionLayer) -> Views:
        key, value = super().write_views(layer)
        slots = self.context.kv_pool.num_slots
        return (
            key.reshape(slots, *key.shape[2:]).view(key.shape),
            value.reshape(slots, *value.shape[2:]).view(value.shape),
        )


@fault(
    "LMCache #3214 (review)",
    "matches-oracle graph-matches-eager reads-own-kv replay-follows-batch",
    executions="graph",
    slug="pool-transposed-once-for-all-graphs",
    modelled="transposes the whole pool; the real bug transposed only the request's pages",
)
class PoolTransposedOnce(StridedBackend):
    """A pool of heads first is made contiguous for a kernel of the other layout, once, before the captures."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"nhd", "hnd"}})
    kept: dict[int, Views] | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        if self.context.kv_pool.layout == "hnd":
            self.kept = {layer.layer_id: self._copied(layer) for layer in self.context.layers}

    @helper
    def _copied(self, layer: AttentionLayer) -> Views:
        key, value = super().read_views(layer)
        return key.contiguous(), value.contiguous()

    def read_views(self, layer: AttentionLayer) -> Views:
        if self.kept is None or not self.in_graph:
            return super().read_views(layer)
        return self.kept[layer.layer_id]


@fault("general; vLLM #43990", "writes-own-kv", "store no more than the row", slug="store-spills-into-page-padding")
class StoreSpillsIntoPadding(StridedBackend):
    """The writer clears the row after the one it stores; after the last slot of a page that is padding."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"padded-pages"}})

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        pages, page = self.context.kv_pool.get_kv_pages(layer.layer_id)[0].view(torch.uint8), self.context.page_size
        number, place = self.at(meta.slots)
        with_padding = pages.as_strided((pages.shape[0], page + 1, *pages.shape[2:]), pages.stride())
        last = place == page - 1
        # Rows that are not the last of their page clear padding of page 0, which is nobody's either.
        at = torch.where(last, number, 0), torch.full_like(place, page)
        with_padding.index_put_(at, with_padding.new_zeros(()))


@fault(
    "aiter #4673", _READS, _HINT, modelled="offsets have as many bits as the layer's own numbers need, instead of 32"
)
class WidthChosenFromLogicalSize(StridedBackend):
    """The width of offsets follows from a layer's size, but a layer that shares a block with others spans more
    memory."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"nhd", "layers-in-block"}})

    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> Views:
        key, value = self.read_views(layer)
        page, place = self.at(slots)
        reach = (1 << key.numel().bit_length()) // key.stride(0)
        return read_at(key, (page % reach, place)), read_at(value, (page % reach, place))


@fault("LMCache #3214 (review)", "completes", "reshape, contiguous and indexing copy")
class OwnPoolDescribedByACopy(StridedBackend):
    """A backend allocates its own pool, but describes it by a view of a copy."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"custom"}})

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        layers = []
        for layer in spec.layers:
            shape = (2, spec.pages, layer.tp_k_head_num, spec.page_size, layer.head_dim)
            buffer = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
            key, value = (half.transpose(1, 2).contiguous() for half in buffer)
            layers.append(KVLayer(key, value, buffer))
        return layers
