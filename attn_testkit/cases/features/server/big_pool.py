"""A KV pool in which the offset of an element needs more than 31 bits, and one whose slot numbers need more than 24."""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import INDEX_WIDTH, ROW_FORMATS, Capabilities, ForwardMode
from ....contract.kv_layouts import OWN
from ...fields import C
from ...indexing import Indexing
from ...layers import Layers
from ...selection import Selection
from ..kv_layout import usual_layout
from .variant import ServerVariant

_ELEMENTS = 1 << 31
"""Number of elements from which on a product of 32-bit integers, slot or page times stride, overflows (vLLM #47671,
#50427; aiter
#4474)."""
_MOST_WIDTH = 128
_NARROW_ROW = 128
"""Numbers of a row of K for which the pool has 2^24 slots: a field of 24 bits does not reach those behind
(vllm-xpu-kernels #459), and float32 does not have all of them."""
_FEW_HEADS = 8
_NARROWEST = ("bf16", "fp16", "fp32")
_APART = frozenset(name for name, form in ROW_FORMATS.items() if form.own_memory)


_CORE = (ForwardMode.DECODE, ForwardMode.EXTEND)


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if small.mode in _CORE:
        found = list(_case(declared, small))
        yield from found
        if small.mode is ForwardMode.DECODE:
            yield from _narrow(declared, found)
        elif "fp8_e4m3" in declared.kv_pool.kv_dtypes:
            # FP8 pools are read by another kernel, which has strides of its own (aiter #4427).
            yield from (case.with_changes(kv_dtype="fp8_e4m3") for case in found)


def _narrow(declared: Capabilities, found: list[C]) -> Iterator[C]:
    """Cases of ``found`` with wide rows once more, with the widest heads for which 2^24 slots need as much memory."""
    for case in found:
        if case.heads.layout.wide_rows or case.heads.kv_heads * case.head_dim <= _NARROW_ROW:
            continue
        fit = [dim for dim in declared.heads.head_dims if case.heads.kv_heads * dim <= _NARROW_ROW]
        if fit:
            yield case.with_changes(head_dim=max(fit))


def big_pool_cases(declared: Capabilities, small: C) -> Iterator[C]:
    """Cases for tier full, derived from ``small``: one in each other mode except draft-decode."""
    if small.mode not in (*_CORE, ForwardMode.DRAFT_DECODE):
        yield from _case(declared, small)


def _case(declared: Capabilities, small: C) -> Iterator[C]:
    """Case with one layer: 2 to 9 GB, of which very little is used."""
    fused = declared.sparse is not None and declared.sparse.indexer is not None and declared.sparse.indexer.fused
    inside = [each for each in sorted(declared.kv_pool.kv_dtypes, reverse=True) if each not in _APART]
    if usual_layout(declared) == OWN or fused or not inside or not small.heads.layout.has_keys:
        return
    width = small.head_dim
    if not small.heads.layout.wide_rows:
        width = max([width, *(dim for dim in declared.heads.head_dims if dim <= _MOST_WIDTH)])
    page, narrow = small.page_size, min(declared.precision.dtypes, key=_NARROWEST.index)
    lens = (9, 2 * page + 5, 1)
    one = small.with_changes(
        head_dim=width,
        dtype=narrow,
        kv_dtype=inside[0] if small.kv_dtype in _APART else small.kv_dtype,
        layers=Layers(1),
        layout="shuffled",
        data="gauss",
        variants=frozenset({"bigpool"}),
        indexer=None,
    )
    yield one.of_requests(lens, padded=1)


def big_index_pool_cases(declared: Capabilities, small: C, tier: str) -> Iterator[C]:
    """Cases with an indexer whose keys are at both ends of more than 2^31 bytes (sglang #34725), derived from
    ``small``. Core has decode and extend, and full has each mode with an indexer. They need 9 to 20 GB of a GPU.
    """
    sparse = declared.sparse
    modes = _CORE if tier == "core" else (*_CORE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)
    if sparse is None or sparse.indexer is None or small.mode not in modes or usual_layout(declared) == OWN:
        return
    indexer, topk = sparse.indexer, min(sparse.topk, key=lambda each: (each == 1, each))
    selection = Selection.of(sparse, topk)
    wide = small.heads.layout.wide_rows
    dims = [dim for dim in sorted(declared.heads.head_dims) if dim * small.heads.kv_heads >= INDEX_WIDTH]
    one = small.with_changes(
        head_dim=small.head_dim if wide or not dims else dims[0],
        dtype=min(declared.precision.dtypes, key=_NARROWEST.index),
        kv_dtype="fp8_e4m3" if wide and "fp8_e4m3" in declared.kv_pool.kv_dtypes else small.kv_dtype,
        layers=Layers(1),
        layout="shuffled",
        data="gauss",
        variants=frozenset({"bigpool"}),
        selection=selection,
        indexer=Indexing(max((each for each in indexer.heads if each <= _FEW_HEADS), default=min(indexer.heads)),
                         indexer.scale == "power_of_two", indexer.fused),
    )  # fmt: skip
    yield one.of_requests((topk + 9, 2 * topk + 2 * small.page_size + 5, 1), padded=1)


BIG_POOL = ServerVariant(
    "bigpool",
    "the KV pool has elements beyond 2^31, and requests have pages at both ends of it; the same holds for index keys",
    "decode and extend; in full every mode except draft-decode",
    _cases,
    needs_no_capability=True,
    pool_elements=_ELEMENTS,
    excludes={
        "scales of the pool in memory of their own": "a slot of such a pool has two places",
    },
    order=100,
    also=("64-bit offsets",),
)
