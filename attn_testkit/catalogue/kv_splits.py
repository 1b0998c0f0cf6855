"""KV splits: the splits of each case, and the cases of a backend that declares a log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..cases.case import Case, Heads
from ..cases.co_residents import many_heads, with_other_heads
from ..cases.features.kv_splits import splits_of as splits_of
from ..cases.features.numbers import nearest
from ..cases.head_layouts import latent, latent_heads
from ..cases.rows import Extend, room_for
from ..contract import Capabilities, ForwardMode
from .layer_options import takes_window, with_options, without_options
from .ranks import rank_cases

_RANKS = {"pages": 2, "tokens": 3}
"""Numbers of ranks for the cases of a kind."""
_MANY_HEADS, _MANY_MLA_HEADS, _MOST_WIDTH = 64, 128, 256
_PROMPT, _MOST_WIDTH_OF_PROMPTS = 70, 128
"""More rows than a tile of 64. Twice the head dim of prompts made one case a tenth of core's time on a CPU."""


def split_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, a case with as little work for each row as the declaration allows. For each kind of
    split: requests that leave a split without keys, also the first split; and all other declared options with many
    keys, merged by the backend if it can. For one kind in each mode: logits far from zero, and other heads.
    """
    every = declared.lse.kinds(small.mode) if declared.lse else ()
    if "ranks" in every:
        yield from rank_cases(declared, small)
    kinds = [kind for kind in every if kind != "ranks"]
    for kind in kinds:
        parts, page = f"{kind}{_RANKS.get(kind, '')}", small.page_size
        if kind == "pages":
            # With pages of one key these would be the tokens: see ``_of_larger_pages``.
            page = nearest(declared.kv_pool.page_sizes, 4)
        few = _like(small, page, (2 * page + 3, 0, page, 1, 70), parts)
        own = declared.lse is not None and declared.lse.merges and kind != "whole"
        first = _like(small, page, (0, 2 * page + 3, 0, page, 1, 70, 33, 9, 17), parts) if kind != "whole" else few
        # A program that walks a list of tiles, and ends where one has no keys, loses the tiles after it (aotriton
        # #235).
        yield without_options(declared, first.with_changes(data="gauss"))
        yield _with_options(declared, few, own)
        if kind == kinds[-1]:
            yield _like(small, page, (300, 7), parts).with_changes(data="negative", merged_by_backend=own)
            # A window of one key leaves all ranks but one without any.
            few = few.with_changes(
                data="peaked", merged_by_backend=own, window=0 if takes_window(declared, few) else -1
            )
            yield from (few.with_changes(**heads) for heads in [*_other_heads(declared, small)] or [{}])
            if declared.options.sinks:
                # They are far above all logits, and in a rank without keys (flash-attention #2752).
                yield few.with_changes(data="negative", sinks=True)
            yield from _of_long_groups(declared, small, parts, page, own)
            if small.mode is ForwardMode.EXTEND:
                yield from _of_one_row_each(declared, small, parts, page, own)
            yield _of_many_heads(declared, small, parts, page, own)
        if kind in ("pages", "whole") and page == 1:
            yield from _of_larger_pages(declared, few)
        if kind == "pages" and own:
            # Of two ranks one has a key. Of more, those that are merged first may both have none.
            yield _like(small, page, (2 * page + 3, 0, page, 1, 70), "pages3").with_changes(
                data="gauss", merged_by_backend=True
            )


def _of_many_heads(declared: Capabilities, small: Case, parts: str, page: int, own: bool) -> Case:
    """Many heads of the widest head dim and, in extend, prompts next to a row that decodes: log-sum-exps are a small
    separate array, with other strides and launches than the output.
    """
    heads = many_heads(declared, small.heads, _MANY_MLA_HEADS if small.heads.layout.wide_rows else _MANY_HEADS)
    prompts = small.mode is ForwardMode.EXTEND
    widest = _MOST_WIDTH_OF_PROMPTS if prompts else _MOST_WIDTH
    dims = [dim for dim in declared.heads.head_dims if small.heads.layout.wide_rows or dim <= widest]
    lens = (70, 5, 40) if prompts else (130, 5, 40)
    many = _like(small, page, lens, parts).with_changes(heads=heads, head_dim=max(dims, default=small.head_dim))
    if prompts:
        rows = min(_PROMPT, declared.bounds.max_extend_tokens)
        new = (rows, 1, max(1, rows // 2))
        many = many.of_requests(lens, rows=Extend(new, room_for(new)))
    return many.with_changes(data="gauss", merged_by_backend=own)


def _of_long_groups(declared: Capabilities, small: Case, parts: str, page: int, own: bool) -> Iterator[Case]:
    """Groups of heads of several KV heads, with keys that are split: kernels that fold a group into rows then store
    log-sum-exps in another order of heads, and use another code path for shorter requests (vllm-project/flash-attention
    #87).
    """
    groups = sorted(declared.heads.gqa_ratios - {1})
    if not small.heads.layout.values_in_keys and "gqa" in declared.heads.families and groups:
        group = max([each for each in groups if each <= 4], default=groups[0])
        yield _like(small, page, (1500, 70), parts).with_changes(
            heads=Heads("gqa", 2 * group, 2), data="gauss", merged_by_backend=own
        )


def _of_one_row_each(declared: Capabilities, small: Case, parts: str, page: int, own: bool) -> Iterator[Case]:
    """Every request has one new token: heads of a group become rows then (flashinfer #5245)."""
    for long in _of_long_groups(declared, small, parts, page, own):
        lens, new = (70, 0, 33), (1,) * 3
        yield long.of_requests(lens, rows=Extend(new, room_for(new)))


def _of_larger_pages(declared: Capabilities, few: Case) -> Iterator[Case]:
    """All keys, and ranks with whole pages, in pages of several keys, if all other cases have pages of one key."""
    for page in sorted(declared.kv_pool.page_sizes - {1})[:1]:
        yield few.with_changes(
            page_size=page, prefixes=(2 * page + 3, 0, page, 1, 70), data="gauss", merged_by_backend=False
        )


def _like(small: Case, page: int, prefixes: tuple[int, ...], parts: str) -> Case:
    """``small`` with other requests, the first of which have all its rows."""
    rows = small.rows.counted([small.width if index % 2 == 0 else 1 for index in range(len(prefixes))])
    return small.of_requests(prefixes, padded=1, rows=rows, page_size=page, kv_splits=parts, padding="prod")


def _with_options(declared: Capabilities, case: Case, own: bool) -> Case:
    """All other declared options, at a length at which keys are split."""
    as_given = case.mode in declared.precision.new_rows_as_given
    return with_options(
        declared, with_other_heads(declared, _like(case, case.page_size, (1500, 70), case.kv_splits)), 60
    ).with_changes(  # New rows that are read as given are those of one call, and here several calls attend to them.
        kv_dtype=min(declared.kv_pool.kv_dtypes) if not as_given else case.kv_dtype,
        merged_by_backend=own,
        data="gauss",
    )


def _other_heads(declared: Capabilities, small: Case) -> Iterator[dict[str, Any]]:
    """Fields of cases with MLA if the others have another family, and with groups if the others have single heads."""
    groups = sorted(declared.heads.gqa_ratios - {1})
    if not small.heads.layout.values_in_keys and latent(declared) and declared.heads.mla_rope_dims:
        few = max([group for group in groups if group <= 4], default=1)
        yield {"heads": latent_heads(declared, few), "rope_dim": min(declared.heads.mla_rope_dims)}
    if small.heads.family != "gqa" and "gqa" in declared.heads.families and groups:
        yield {"heads": Heads("gqa", 2 * groups[0], 2), "rope_dim": 0}
