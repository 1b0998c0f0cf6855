"""Two-batch overlap: the rows of a step are cut into two batches, which run in turn, layer by layer.

A server overlaps the communication of one batch with the computation of the other (SGLang's ``TboAttnBackend``, vLLM's
dual batch overlap, which calls the two micro-batches).
"""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from ...rows import Extend, room_for
from .variant import ServerVariant

_LENS = (9, 70, 1, 33, 2)
"""Prefixes. With one padded request the largest graph has six requests, which are cut into three and three."""
_PROMPTS = (20, 7, 12, 3, 1)
"""New tokens, whose half is inside the second prompt."""
_MODES = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY)


def is_cut(case: Fields) -> bool:
    """True if the steps of a case are cut into two batches."""
    return TWO_BATCH_OVERLAP.word in case.variants


def may_cut_prompts(declared: Capabilities, case: Fields) -> bool:
    """True if a prompt may have rows in both batches: its later rows need nothing of the earlier ones but their keys,
    and may read them from the pool as they are.
    """
    state = case.state
    own_keys = case.kv_dtype == "same" and "noncausal" not in case.variants and case.spans is None
    plain_state = state is None or not (state.snapshots or state.continues)
    return own_keys and plain_state and case.qq_bias == "none" and not declared.promises.batch_invariant


def _fits(declared: Capabilities, case: Fields) -> bool:
    runs = case.mode in declared.eager or case.mode is not ForwardMode.EXTEND
    return declared.server.two_batch_overlap and case.mode in _MODES and runs


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if not _fits(declared, small):
        return
    case = small.of_requests(
        _LENS, padded=1, data="gauss", layout="shuffled", variants=frozenset({TWO_BATCH_OVERLAP.word})
    )
    if small.mode is ForwardMode.EXTEND:
        new = tuple(min(count, declared.bounds.max_extend_tokens) for count in _PROMPTS)
        case = case.with_changes(rows=Extend(new, room_for(new)))
    yield case


TWO_BATCH_OVERLAP = ServerVariant(
    "two_batch_overlap",
    "each step is cut into two batches, which are planned one after the other and whose layers run in turn",
    "server.two_batch_overlap",
    _cases,
    _fits,
    excludes={
        "rows of a draft model": "servers do not cut the batches of a draft model",
        "states of drafts": "both batches of a verified step would use the same scratch",
        "KV splits": "the results of a split are merged for a whole batch",
        "cross-attention layers": "encoder tokens are stored for a whole batch",
        "padded_tokens": "servers pad a batch before they cut it",
        "piecewise": "pieces of a graph are of a whole batch",
    },
    eager_only={ForwardMode.EXTEND: "servers capture two batches only if all requests have the same number of rows"},
    order=200,
    also=("two-batch overlap", "dual batch overlap", "TBO", "DBO", "ubatch", "microbatch"),
)
