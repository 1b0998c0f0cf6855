"""The last rows of an extend step as steps of other modes: the same tokens with the same keys, in the same slots.

A server that trains on its own output scores tokens in a prefill that it decoded or verified before, and both results
have to agree in every bit (``Promises.mode_invariant``). Such a server decodes in graphs, so these steps are
replayed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ..cases.case import Case
from ..cases.declared import not_declared
from ..cases.features.server.table import variant_of
from ..cases.rows import Decode, Rows, Verify
from ..cases.trees import chain
from ..contract import Capabilities, ForwardMode
from .numerics import numerics_of
from .schedule import Request, Schedule, Step, make_schedule

LAST_ROWS = "last rows"
"""Name of the step with the last rows, and the prefix of the names of further steps that only graphs have."""
_MOST = 4
_MOST_CAPTURED = 128
"""Requests of a batch up to which its last rows are captured: captures of a thousand requests take longer than
everything else."""


def has_last_rows(case: Case) -> bool:
    """True for an extend whose last rows can be run in other modes: each request has a last row, which sees only
    earlier keys.

    Not with KV splits, states, selections or other modes on the instance; not for chunks, because a request may have no
    row in a step, and not in a pool beyond 2^31 elements, in which the case's variant places the slots. With spans a
    row sees later keys, and a bias belongs to the rows of a step.
    """
    biased = case.spans is not None or case.qq_bias != "none"
    left_out = case.kv_splits or case.multi_mode or case.state or case.selection or case.chunks > 1 or biased
    variant = variant_of(case)
    fits = variant.causal and not variant.pool_elements and not left_out
    return case.mode is ForwardMode.EXTEND and fits and min(case.new, default=0) > 0


@lru_cache(maxsize=64)
def last_rows_of(own: Schedule, declared: Capabilities) -> tuple[Schedule, ...]:
    """A schedule for each declared mode of last rows: decode, and a chain to verify. The same objects are returned
    every time.

    They share the instance of ``own``, whose first step has the rows. The first step of each runs in eager mode, if
    that is declared. Graphs replay all steps: one is in a bucket that the batch fills, the other in the next power of
    two, unless the case has no padded requests.
    """
    case, first = own.case, own.steps[0]
    if not declared.promises.mode_invariant or not has_last_rows(case):
        return ()
    # Buckets that live requests fill have requests that the case does not name.
    width = min(_MOST, declared.bounds.max_q_rows, *(request.new for request in first.requests))
    if width < 1:
        return ()
    rows: dict[ForwardMode, Rows] = {ForwardMode.DECODE: Decode()}
    if width > 1:
        rows[ForwardMode.TARGET_VERIFY] = Verify(chain(width))
    # A row that attends new rows as they were given reads other numbers if there are fewer of them.
    as_given = declared.precision.new_rows_as_given if case.kv_dtype != "same" else frozenset()
    found = []
    for mode, each in rows.items():
        count = 1 if mode is ForwardMode.DECODE else width
        other = case.with_changes(rows=each, variants=frozenset(), instance_of=case)
        if mode not in declared.eager | declared.graph or not_declared(declared, other) or as_given & {mode, case.mode}:
            continue
        requests = tuple(
            replace(request, prefix=request.prefix + request.new - count, new=count, tree=other.tree)
            for request in first.requests
        )
        buckets = (first.bs,) if case.padding == "small" else (first.bs, 1 << first.bs.bit_length())
        steps = tuple(_in_bucket(first, index, bucket, requests) for index, bucket in enumerate(buckets))
        found.append(
            replace(
                make_schedule(other, numerics_of(other, declared)),
                buckets=buckets[::-1],
                steps=steps,
                num_pages=own.num_pages,
                pool_rows=own.pool_rows,
                max_context_len=own.max_context_len,
            )
        )
    return tuple(found)


def _in_bucket(first: Step, index: int, bucket: int, requests: tuple[Request, ...]) -> Step:
    name = LAST_ROWS + ", padded" * (bucket > len(requests))
    return replace(first, name=name, label=name, index=index, bucket=bucket, requests=requests, chunk_of=first)


def captured_for_bits(schedules: Sequence[Schedule], declared: Capabilities) -> list[Schedule]:
    """Schedules that an eager case-run captures after its eager steps, to compare bits: those of last rows, and the
    extend itself, if their modes are declared for graphs. There are none without last rows, and none for a very large
    batch.
    """
    rows = [each for each in schedules if each.steps[0].name == LAST_ROWS and each.steps[0].bs <= _MOST_CAPTURED]
    return [each for each in (schedules[0], *rows) if rows and each.case.mode in declared.graph]


def replayed_for_bits(schedule: Schedule) -> tuple[Step, ...]:
    """Steps of a schedule ``captured_for_bits`` that are replayed: those that have last rows, or the extend's own."""
    return schedule.steps if schedule.steps[0].name == LAST_ROWS else schedule.steps[:1]
