"""Pairs of declared values that are not in the covering array, because it has only some values of each capability: few
head dims and groups."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case, Heads
from ..cases.co_residents import many_heads
from ..cases.features.head_dim import dims_of_array
from ..cases.features.heads import typical_heads
from ..cases.features.numbers import nearest, some_of
from ..cases.head_layouts import latent, latent_heads
from ..cases.layers import Layers
from ..cases.rows import Extend, room_for
from ..contract import Capabilities, ForwardMode
from .layer_options import with_options
from .page_counts import groups_of_pages

_LENS = (70, 33, 1)
_SEVERAL_SPLITS = (1025, 33)
_PAGE, _WINDOW = 16, 40
_FAR_MODES, _NARROW = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND}), 11
_FAR = (66_000, 32_769)
"""Two requests whose last KV tokens are on both sides of 2^15, for signed 16-bit numbers; with a single request of
40,000 all positions would be off by the same amount."""
_GROUPS, _MLA_HEADS = (2, 4, 5, 6, 7, 8, 12, 16, 32), (8, 16, 32, 64, 128)
_NOISY = (600, 513, 700, 431) * 3
_MANY_HEADS, _USUAL_DIM, _MOST_DIMS = 32, 128, 8
_TILE_AND_MORE = 67
"""Rows of a prompt that fill tiles of 32 and of 64, and begin another."""


def declared_pair_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``: windows at positions of more than 15 and 16 bits; each group of heads with a pool
    of FP8; prompts of each head dim that the array lacks with each dtype of the pool; decode of each group with all
    options, of each head dim and dtype of the pool with several splits, and of outputs that show another order of a
    sum.
    """
    if small.mode in _FAR_MODES & declared.windows.modes and not small.heads.layout.wide_rows:
        yield small.of_requests(_FAR, data="one_hot", window=_NARROW)
    page = nearest(declared.kv_pool.page_sizes, _PAGE)
    one = small.with_changes(page_size=page, layers=Layers(1), data="gauss", layout="shuffled")
    yield from _groups_in_fp8(declared, one)
    if small.mode is ForwardMode.EXTEND:
        yield from _dims_with_tiles(declared, one)
    if small.mode is not ForwardMode.DECODE:
        return
    yield from _groups_with_options(declared, one)
    yield from _dims_with_splits(declared, one)  # sparkinfer #330
    if declared.promises.deterministic and "fp32" not in declared.precision.dtypes:
        heads = many_heads(declared, small.heads, _MANY_HEADS)
        dim = small.head_dim if small.heads.layout.values_in_keys else nearest(declared.heads.head_dims, _USUAL_DIM)
        dtype = "fp16" if "fp16" in declared.precision.dtypes else "bf16"
        yield one.with_changes(heads=heads, head_dim=dim, dtype=dtype, prefixes=_NOISY, bucket=len(_NOISY))


def _groups_in_fp8(declared: Capabilities, one: Case) -> Iterator[Case]:
    """Each group with a pool of FP8, which may have another kernel or layout of rows. For example, 32 heads of MLA were
    folded to rows of 16 only in FP8 (vLLM #46952), which one row of one request does not show. FP8 dtypes alternate.
    Some groups have it in many lengths (``page_counts.py``).
    """
    groups: list[tuple[Heads, int]] = []
    if latent(declared) and one.mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        rope = one.rope_dim or min(declared.heads.mla_rope_dims)
        groups += [(latent_heads(declared, count), rope) for count in _MLA_HEADS if count in declared.heads.gqa_ratios]
    if "gqa" in declared.heads.families and one.mode is ForwardMode.DECODE:
        paged = set() if one.heads.layout.values_in_keys else groups_of_pages(declared)
        groups += [(Heads("gqa", 2 * group, 2), 0) for group in _GROUPS if group in declared.heads.gqa_ratios - paged]
    narrow = sorted(declared.kv_pool.kv_dtypes - {"same"})
    for turn, (heads, rope) in enumerate(groups if narrow else ()):
        kv_dtype = narrow[turn % len(narrow)]
        yield one.with_changes(heads=heads, rope_dim=rope, kv_dtype=kv_dtype, prefixes=_LENS, bucket=len(_LENS))


def _groups_with_options(declared: Capabilities, one: Case) -> Iterator[Case]:
    """Each group with all options, because a kernel is chosen by its group: one kernel had sinks only for the first 16
    heads."""
    if (
        not (declared.options.sinks or declared.options.logit_cap)
        or one.heads.layout.values_in_keys
        or "gqa" not in declared.heads.families
    ):
        return
    usual = [group for group in _GROUPS if group in declared.heads.gqa_ratios]
    for group in sorted({*usual, max(declared.heads.gqa_ratios, default=1)} - {1}):
        yield with_options(declared, one, _WINDOW).with_changes(
            layers=Layers(),
            heads=Heads("gqa", 2 * group, 2),
            prefixes=_LENS,
            bucket=len(_LENS),
        )


def _dims_with_tiles(declared: Capabilities, one: Case) -> Iterator[Case]:
    """Each head dim that the array lacks and each dtype, with a prompt of more than a tile of rows: such a tile of 32
    rows needs memory of a program that depends on all three (flashinfer #3863)."""
    rows = min(_TILE_AND_MORE, declared.bounds.max_extend_tokens)
    for dim in some_of(declared.heads.head_dims - set(dims_of_array(declared, "core")), _MOST_DIMS):
        for kv_dtype in sorted(declared.kv_pool.kv_dtypes):
            yield one.of_requests((40, 0), rows=Extend((rows, 3), room_for((rows, 3)))).with_changes(
                heads=_grouped(declared, one), head_dim=dim, kv_dtype=kv_dtype
            )


def _grouped(declared: Capabilities, one: Case) -> Heads:
    """Several query heads for each KV head, if they are declared and not all heads are MLA's."""
    grouped = [heads for heads in typical_heads(declared) if heads.family == "gqa"]
    return one.heads if one.heads.layout.values_in_keys or not grouped else grouped[0]


def _dims_with_splits(declared: Capabilities, one: Case) -> Iterator[Case]:
    """Each head dim and dtype with several splits, because a kernel is compiled for both, and its partial results have
    strides of both."""
    heads = _grouped(declared, one)
    for dim in some_of(declared.heads.head_dims, _MOST_DIMS):
        for kv_dtype in sorted(declared.kv_pool.kv_dtypes):
            yield one.with_changes(
                heads=heads,
                head_dim=dim,
                kv_dtype=kv_dtype,
                prefixes=_SEVERAL_SPLITS,
                bucket=len(_SEVERAL_SPLITS),
            )
