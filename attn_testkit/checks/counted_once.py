"""The check of counts: every KV token of a row counts exactly once, at any length."""

from __future__ import annotations

from collections.abc import Sequence

from ..cases.case import CODES
from ..families.table import family_of
from ..results.finding import Finding
from .comparison import Comparison, place_of_max
from .describe import row_name
from .evaluation import Evaluation
from .key_counts import HALF_A_KEY
from .miscounts import Miscount, Miscounts, find_miscounts
from .numeric import spread


def counted_once(comparison: Comparison) -> list[Finding]:
    """Check that no count of a KV token is off by half a token, if every element and row is within its limit."""
    if comparison.right or comparison.worst is not None or not comparison.all_finite:
        return []
    data, ratios = comparison.expected.data, comparison.key_ratio
    layer, row, head = place_of_max(ratios)
    found = find_miscounts(comparison, row)
    off = HALF_A_KEY * float(ratios[layer, row, head])
    return [
        Finding(
            "keys-counted-once",
            f"request {int(data.row_request[row])}: {miscounts_text(found)}",
            where=f"out[{comparison.name(layer)}, {row_name(data, row)}, head {head}]: "
            f"the count of a KV token is off by {off:.2f} (limit {HALF_A_KEY})",
            spread=spread(comparison),
            step=comparison.observed.label,
        )
    ]


def miscounts_text(found: Miscounts | None) -> str:
    """Miscounts in words: ``KV token 31 was left out``, ``KV token 77 of request 3 was read instead of token 50``."""
    if found is None:
        return "many KV tokens are counted a wrong number of times, or with wrong weights"
    gone, others = found.left_out, found.of_others
    exchanged = len(gone) == len(others) == 1 and gone[0].length == others[0].length and others[0].extra == 1
    if exchanged:
        said = [f"{_names(others)} of request {others[0].request} {_was(others)} read instead of {_names(gone)}"]
    else:
        said = [f"{_names(gone)} {_was(gone)} left out"] if gone else []
        for request in dict.fromkeys(run.request for run in others):
            runs = [run for run in others if run.request == request]
            said.append(f"{_names(runs)} of request {request} {_was(runs)} read")
    for extra in dict.fromkeys(run.extra for run in found.repeated):
        runs = [run for run in found.repeated if run.extra == extra]
        said.append(f"{_names(runs)} {_was(runs)} counted {_TIMES.get(extra, f'{extra + 1} times')}")
    if found.unseen:
        said.append(f"{_names(found.unseen)} {_was(found.unseen)} read, which the row may not see")
    return "; ".join(said)


_TIMES = {1: "twice"}


def _names(runs: Sequence[Miscount]) -> str:
    noun = "KV token" if _count(runs) == 1 else "KV tokens"
    return f"{noun} " + ", ".join(f"{r.first}..{r.last}" if r.length > 1 else str(r.first) for r in runs)


def _was(runs: Sequence[Miscount]) -> str:
    return "was" if _count(runs) == 1 else "were"


def _count(runs: Sequence[Miscount]) -> int:
    return sum(run.length for run in runs)


EVALUATIONS = (
    Evaluation(
        "keys-counted-once",
        shown_by=lambda case: case.data == CODES and family_of(case).counts_keys,
        run=lambda comparison, *_: counted_once(comparison),
    ),
)
