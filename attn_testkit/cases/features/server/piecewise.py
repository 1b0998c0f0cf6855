"""Piecewise and breakable graphs: attention runs eagerly, and the layers around it are graphs of a fixed number of
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from ...plan import Plan
from .variant import ServerVariant

_LENS = (9, 70, 1)
_OF_VLLM = frozenset({"piecewise", "given_out", "padded_tokens"})
"""vLLM gives q of all rows, and the memory that the next piece reads, and captures without attention. SGLang cuts q to
the live rows, copies, and captures a prompt of no request with its attention."""


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    # A draft runs its steps in one graph. Selected keys are the indexer's own tensor, and no piece gives it.
    if small.mode not in declared.eager or small.mode is ForwardMode.DRAFT_DECODE or declared.sparse is not None:
        return
    case = small.of_requests(_LENS, padded=1, data="gauss", layout="shuffled")
    yield case.with_changes(variants=frozenset({"piecewise"}))
    if declared.server.takes_out and declared.server.takes_more_rows:
        yield case.with_changes(variants=_OF_VLLM)


def _plans(case: Fields, plans: list[Plan]) -> list[Plan]:
    """Steps also run eagerly: steps with other rows use the memory of the first one, and so does the larger batch after
    the exact one.
    """
    return [replace(plan, eager_too=not plan.exact) for plan in plans]


PIECEWISE = ServerVariant(
    "piecewise",
    "in eager steps attention runs between graphs: q, k and v are the first rows of their memory, NaN follows, and the "
    "capture of an extend has planned and run one prompt without a prefix",
    "eager modes except draft-decode",
    _cases,
    plans=_plans,
    needs_no_capability=True,
    excludes={
        "empty_batches": "a rank without requests runs no attention",
        "states": "layers that keep a state have graph pieces of their own",
    },
    order=120,
    also=("piecewise graphs", "breakable graphs", "BCG", "PCG"),
)
