"""The order of a plan's case-runs: as the catalogue lists them, or the ones with the most readable failure first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ...cases.case import DATA, Case
from ...cases.fields import DEFAULTS
from ...contract import Execution
from .most_valuable import Entry, most_valuable_first
from .request import Item


def ordered(entries: Sequence[Entry], order: str, failed: Collection[tuple[str, str]] = ()) -> tuple[Item, ...]:
    """The items, one backend after the other, in one of ``request.ORDERS``; ``failed``: see ``most_valuable_first``."""
    if order == "most valuable":
        return most_valuable_first(entries, failed)
    rank = _RANKS[order]
    first: dict[tuple[str, str], int] = {}
    for index, (item, _) in enumerate(entries):
        first.setdefault((item.backend, item.case), index)
    backends = {backend: index for index, backend in enumerate(dict.fromkeys(item.backend for item, _ in entries))}

    def place(entry: Entry) -> tuple[int, bool, tuple[int, ...], int, bool]:
        # Eager and graph of one case next to each other: they share data and the oracle's answer.
        # Under no_grad first: what a module keeps for the whole process may be made there and used under
        # inference_mode, and not the other way round. A server uses one of the two.
        item, case = entry
        graph = item.execution == Execution.GRAPH.value
        return backends[item.backend], case.inference_mode, rank(case), first[item.backend, item.case], graph

    return tuple(item for item, _ in sorted(entries, key=place))


def _as_listed(case: Case) -> tuple[int, ...]:
    return ()


_MANY_REQUESTS, _MANY_KEYS = 4, 256
"""Numbers up to which requests and keys count as few, so that a failure can be followed by hand."""
_OPTIONS = (
    "kv_dtype", "kv_layout", "window", "logit_cap", "sinks", "layers", "kv_splits", "padding", "variants",
)  # fmt: skip
"""Fields of a case whose default is the plain value."""


def _oddness(case: Case) -> tuple[int, ...]:
    """Sort key of a case: 0, or 1 if several modes take part; then the number of its settings that are not plain."""
    odd = [getattr(case, name) != DEFAULTS[name] for name in _OPTIONS]
    odd += [
        case.data not in DATA,
        case.chunks > 1,
        case.topk > 1,
        case.bs > _MANY_REQUESTS,
        max(case.prefixes) + case.most_new > _MANY_KEYS,
    ]
    return int(case.multi_mode or case.rounds > 0), sum(odd)


_RANKS: Mapping[str, Callable[[Case], tuple[int, ...]]] = {"listed": _as_listed, "plainest": _oddness}
