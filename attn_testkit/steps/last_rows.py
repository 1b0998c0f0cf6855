"""The last rows of an extend step as steps of other modes: the same tokens with the same keys, in the same slots.

A server that trains on what it generates scores tokens in a prefill that it has decoded or verified before, and the two
have to agree in every bit (``Capabilities.mode_invariant``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..cases.case import Case
from ..cases.declared import not_declared
from ..cases.rows import Decode, Rows, Verify
from ..cases.server_variants import variant_of
from ..cases.trees import chain
from ..contract import Capabilities, ForwardMode
from .numerics import numerics_of
from .schedule import Schedule, make_schedule

__all__ = ["LAST_ROWS", "has_last_rows", "last_rows_of"]

LAST_ROWS = "last rows"
"""Name of their step."""
_MOST = 4


def has_last_rows(case: Case) -> bool:
    """True for an extend whose last rows other modes can have: each request has one, and sees only earlier keys.

    Not with KV splits, states, selections or other modes on the instance; not for chunks, of which a request may have
    none in a step, nor in a pool beyond 2^31 elements, in which slots lie by the case's variant.
    """
    left_out = case.kv_splits or case.multi_mode or case.state or case.selection or case.chunks > 1
    variant = variant_of(case)
    fits = variant.causal and not variant.pool_elements and not left_out
    return case.mode is ForwardMode.EXTEND and fits and min(case.new, default=0) > 0


@lru_cache(maxsize=64)
def last_rows_of(own: Schedule, declared: Capabilities) -> tuple[Schedule, ...]:
    """A schedule of one step for each mode that has them, of those declared for eager: decode, and a chain to verify.

    They share the instance of ``own``, whose first step has the rows. The same objects every time.
    """
    case, first = own.case, own.steps[0]
    if not declared.mode_invariant or not has_last_rows(case):
        return ()
    # Buckets that live requests fill have requests that the case does not name.
    width = min(_MOST, declared.max_q_rows, *(request.new for request in first.requests))
    if width < 1:
        return ()
    rows: dict[ForwardMode, Rows] = {ForwardMode.DECODE: Decode()}
    if width > 1:
        rows[ForwardMode.TARGET_VERIFY] = Verify(chain(width))
    as_given = declared.new_rows_as_given if case.kv_dtype != "same" else frozenset()
    found = []
    for mode, each in rows.items():
        count = 1 if mode is ForwardMode.DECODE else width
        other = case.with_changes(rows=each, variants=frozenset(), instance_of=case)
        if mode not in declared.eager or not_declared(declared, other) or (mode in as_given) != (case.mode in as_given):
            continue
        requests = tuple(
            replace(request, prefix=request.prefix + request.new - count, new=count, tree=other.tree)
            for request in first.requests
        )
        step = replace(first, name=LAST_ROWS, label=LAST_ROWS, requests=requests, chunk_of=first)
        made = make_schedule(other, numerics_of(other, declared))
        found.append(
            replace(
                made,
                steps=(step,),
                num_pages=own.num_pages,
                pool_rows=own.pool_rows,
                max_context_len=own.max_context_len,
            )
        )
    return tuple(found)
