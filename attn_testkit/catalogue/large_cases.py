"""Large cases: more requests times heads, and more rows, than fit one dimension of a CUDA grid; as many keys as in long
contexts, in each dtype of the KV pool; a large batch of long requests for backends that declare batch invariance; and
batch sizes on both sides of those at which a backend declares that its kernel changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..cases.case import Case, Heads
from ..cases.co_residents import many_heads
from ..cases.features.rows import most_rows
from ..cases.head_layouts import as_many
from ..cases.layers import Layers
from ..cases.rows import Extend, room_for
from ..contract import ROW_FORMATS, Capabilities, ForwardMode

_GRID = 65_535
"""The largest y and z of a grid: a launch with more fails, and its outputs keep their old contents (sglang #34941)."""
_KEYS = 130_900
"""Keys before the step in a context of 131,072 tokens; the other tokens are new."""
_FAR, _FAR_OF_FORMATS, _FAR_OF_WIDE = 66_000, 16_500, 8_300
"""Keys of a request in each dtype of the pool. Rows of a format are unpacked, and those of MLA have 576 numbers each:
more keys take a minute without a device."""
_MANY_HEADS, _MOST_HEADS = 32, 128
_ROWS = 65
_PREFIXES = (1, 3, 9)
_COMPANY, _OF_EACH = (3, 40, 77, 114, 151, 188), 11
"""Lengths of up to a few tiles, and how often each occurs: more than 64 requests."""
_BY_BITS = ("fp32", "fp16", "bf16")
"""Dtypes by bits: an output with more bits shows another order of a sum more often."""
_SPLIT_OR_NOT = (9, 70, 1, 33)
"""Keys of the requests, in turn: several splits, and none."""


def large_cases(declared: Capabilities, tier: str, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, a case with little work for each row and key. Core has one of decode, and full has
    all."""
    one = small.with_changes(layers=Layers(1), layout="shuffled", data="gauss")
    # With a single head a grid of so many heads and requests would need 65,536 requests.
    costly = small.heads.layout.wide_rows or small.heads.layout.kv_heads == "single"
    if tier == "full":
        long = one.with_changes(heads=many_heads(declared, small.heads, _MANY_HEADS), data="one_hot")
        yield long.of_requests((_KEYS, 70))
    # Rows of MLA have 576 numbers per head: minutes of comparing.
    if (tier == "full" or small.mode is ForwardMode.DECODE) and not costly:
        yield _beyond_a_grid(declared, one)
    if tier == "full" and small.mode is ForwardMode.EXTEND and not costly:
        rows = min(_ROWS, most_rows(declared, small.mode))
        new = (rows,) * (_GRID // rows + 1)
        heads = Heads("mha", 1, 1) if "mha" in declared.heads.families else small.heads
        yield one.of_requests((1,) * len(new), rows=Extend(new, room_for(new)), heads=heads)


def far_cases(declared: Capabilities, small: Case, found: Sequence[Case]) -> Iterator[Case]:
    """Cases of decode and extend with a long request in each dtype of the KV pool but that of ``small``, of which other
    cases are as long: a kernel for one dtype may change with the number of keys (rMLX #374 from 8,192 on). ``found``:
    cases of the array, of which one has heads for which there are such rows.
    """
    if small.mode not in (ForwardMode.DECODE, ForwardMode.EXTEND):
        return
    for kv_dtype in sorted(declared.kv_pool.kv_dtypes - {small.kv_dtype}):
        alike = [case for case in found if case.kv_dtype == kv_dtype]
        if not alike:
            continue
        like = min(alike, key=lambda case: case.heads.q_heads * case.head_dim)
        shape = {name: getattr(like, name) for name in ("heads", "head_dim", "rope_dim", "dtype", "kv_dtype")}
        wide = like.heads.layout.wide_rows
        if wide and small.mode is ForwardMode.EXTEND:
            continue  # other cases count every key of requests of 4,096 keys, and none is longer
        far = _FAR_OF_WIDE if wide else _FAR_OF_FORMATS if kv_dtype in ROW_FORMATS else _FAR
        yield small.of_requests((far, 70), layers=Layers(1), layout="shuffled", data="gauss", **shape)


def too_large_for_a_cpu(case: Case) -> bool:
    """True for a case in which a matrix of all rows and keys needs 17 GB per head, as in torch backends and fakes. Also
    for target-verify in a context of a million tokens, where copies of the request table take minutes on a CPU.
    """
    return sum(case.new) > _GRID or ("wide_scores" in case.variants and case.tree is not None)


def _beyond_a_grid(declared: Capabilities, one: Case) -> Case:
    """Case with slightly more requests times query heads than a grid holds. If KV heads select for themselves, each
    query head has its own KV head where this is declared: a kernel then has as many lists (flashinfer #2802).
    """
    heads = many_heads(declared, one.heads, _MOST_HEADS)
    if declared.sparse is not None and declared.sparse.per_kv_head and as_many(declared):
        heads = Heads(as_many(declared)[0].name, _MOST_HEADS, _MOST_HEADS)
    requests = _GRID // heads.q_heads + 1
    lens = tuple(sorted((_PREFIXES * requests)[:requests]))
    return one.with_changes(heads=heads).of_requests(lens)


def batch_mates_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small`` with more requests than kernels for few requests accept, and several tiles of keys
    each (pegainfer #623)."""
    if not declared.promises.batch_invariant:
        return
    prefixes = tuple(prefix for prefix in _COMPANY for _ in range(_OF_EACH))
    dtype = next(dtype for dtype in _BY_BITS if dtype in declared.precision.dtypes)
    yield small.of_requests(prefixes, dtype=dtype, layers=Layers(1), data="gauss", layout="shuffled")


def switch_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, a case with as little work for each row as the declaration allows. The graph is as
    large as the batch."""
    for bs in sorted({size for at in declared.bounds.kernel_changes_at for size in (at - 1, at)}):
        lens = tuple(_SPLIT_OR_NOT[i % len(_SPLIT_OR_NOT)] for i in range(bs))
        yield small.of_requests(lens, data="gauss")
    for keys in sorted({total for at in declared.bounds.kernel_changes_at_keys for total in (at - 1, at)}):
        if small.mode is not ForwardMode.DRAFT_DECODE:
            # Other steps of the case have longer requests, by a page and a few keys.
            most = declared.bounds.max_context_len - 2 * small.page_size - 2 * small.width - 8
            yield small.of_requests(_of_sum(keys, small.width, most), data="gauss")


def _of_sum(keys: int, rows: int, most: int) -> tuple[int, ...]:
    """Prefixes of requests with ``rows`` rows each. No request has more than ``most`` keys, and all together have
    ``keys``. Each request gets half of the remaining keys, and the last one the rest.
    """
    lens: list[int] = []
    while keys > 0:
        half = min(keys // 2, most)
        lens.append(keys if keys <= most and keys - half < 2 * rows else max(half, rows))
        keys -= lens[-1]
    return tuple(length - rows for length in lens)
