"""Cases whose model has three layers, under the ids of a later pipeline rank: in one KV group, and in two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..contract import Capabilities
from .case import Case
from .layers import Layers

__all__ = ["layer_cases"]

_RANK = Layers(3, 5)
_LENS = (21, 40, 4)
_WINDOW = 7
"""Shorter than two of the requests."""


def layer_cases(claims: Capabilities, small: Case) -> Iterator[Case]:
    """Without options, and with all that are claimed; made of ``small``, which has little work for each row."""
    new = small.new[:1] * len(_LENS)
    plain = replace(small, prefixes=_LENS, new=new, data="gauss", bucket=len(_LENS) + 1, layers=_RANK)
    windowed = small.mode in claims.sliding_window and (small.topk < 2 or claims.window_in_trees)
    window = max(_WINDOW, claims.min_window)
    options = replace(
        plain,
        window=window if windowed else -1,
        logit_cap=1.5 if claims.logit_cap else 0.0,
        sinks=claims.sinks,
        kv_dtype=min(claims.kv_dtypes),
    )
    yield from dict.fromkeys((plain, options))
    if claims.kv_groups and not small.draft:
        page = min((page for page in claims.page_sizes if page > 1), default=1)
        # A windowed group has let go of whole pages of the first two requests.
        lens = (2 * page + window, 4 * page + window - 1, 6)
        for each in dict.fromkeys((plain, options)):
            yield replace(each, layers=replace(_RANK, groups=True), page_size=page, prefixes=lens)
