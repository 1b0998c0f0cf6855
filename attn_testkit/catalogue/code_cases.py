"""Cases that count keys: every key of long rows is counted, in each mode, and with windows, sinks and each dtype of the
KV pool."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import CODES, Case
from ..cases.features.numbers import nearest, some_of
from ..contract import Capabilities, ForwardMode
from .layer_options import with_options

_LENS = (4097, 300, 33)
"""Prefixes that are not multiples of a tile or of a page; other requests follow, so that a wrong read hits their
keys."""
_FEW_LENS = (1025, 33)
_MLA_LENS = (1025, 300, 33)
"""Lengths for keys of 576 numbers: longer lengths are for ``full``, except one in each mode."""
_MLA_LONG = (4096, 300, 33)
_MANY_LENS = (66_001, 1500, 33)
"""Lengths that need more than 16 bits. With ordinary values one key of 66,000 is not visible."""
_LONGEST, _LONGEST_OF_MLA = (66_000,), {ForwardMode.DECODE: (16_384,)}
"""Keys of the longest request that core has in each mode. Cases with one-hot values observe some of the keys; these
cases observe all keys."""
_OPTIONS_LENS = (1500, 70, 9)
_WINDOW, _MOST_PAGES = 700, 5
_PAGE, _DIM, _FEW_CHANNELS = 16, 128, 64
"""Page size and head dims of servers, if they are declared: splits begin at pages, and a code has as many channels as a
value."""


def code_cases(declared: Capabilities, tier: str, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, a case with few heads and rows."""
    dtype = min(declared.precision.dtypes)  # bf16 first, whose rounding is coarsest
    page = nearest(declared.kv_pool.page_sizes, _PAGE)
    dim = max((dim for dim in declared.heads.head_dims if dim <= _DIM), default=small.head_dim)
    minimal = small.with_changes(data=CODES, dtype=dtype, page_size=page)
    if not small.heads.layout.values_in_keys:
        minimal = minimal.with_changes(head_dim=dim)
    if tier == "smoke":
        if small.mode is ForwardMode.DECODE:
            yield _of(minimal, _FEW_LENS)
        return
    wide = small.heads.layout.wide_rows
    yield _of(minimal, _MLA_LONG if wide else _LENS)
    if small.mode is ForwardMode.DECODE:
        yield from _of_other_pages(declared, minimal)
    yield with_options(declared, _of(minimal, _OPTIONS_LENS), _WINDOW).with_changes(
        dtype=max(declared.precision.dtypes - {"fp32"}, default=dtype),
        kv_dtype=min(declared.kv_pool.kv_dtypes),
    )
    if longest := _LONGEST_OF_MLA.get(small.mode) if wide else _LONGEST:
        # Fewer channels: codes of 64 tell one key of 66,000 as well as codes of 128, at half the time.
        dim = small.head_dim if wide else nearest(declared.heads.head_dims, _FEW_CHANNELS)
        yield minimal.with_changes(head_dim=dim).of_requests(longest)
    if tier == "full":
        yield from [_of(minimal, _LENS)] * wide
        yield _of(minimal, _MANY_LENS)


def _of_other_pages(declared: Capabilities, minimal: Case) -> Iterator[Case]:
    """Cases of each declared page size with more pages than a tile or a table of pages has. One kernel with pages of
    256 lost the keys from 4,096 on, except the keys of the last page (flashinfer #4347).
    """
    far = _MLA_LENS[0] if minimal.heads.layout.wide_rows else _LENS[0]
    for page in some_of(declared.kv_pool.page_sizes - {minimal.page_size}, _MOST_PAGES):
        yield _of(minimal.with_changes(page_size=page), (far + 2 * page + page // 2, *_LENS[1:]))


def _of(case: Case, lens: tuple[int, ...]) -> Case:
    return case.of_requests(lens, padded=1)
