"""The number of requests in the case's own batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...contract import Capabilities
from ..fields import Changes, Fields
from .feature import Feature, Simpler, Without, no_capability


def _keep(case: Fields, which: Sequence[int]) -> Changes:
    prefixes, new = (tuple(each[i] for i in which) for each in (case.prefixes, case.new or case.prefixes))
    return {"prefixes": prefixes, "rows": case.rows.counted(new), "bucket": len(which) + case.bucket - case.bs}


def _fewer(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    """Fewer requests to try: only one request; one request of each kind; half of them; all except one of a kind."""
    entries = list(zip(case.prefixes, case.new or case.prefixes, strict=True))
    kinds = [entries.index(kind) for kind in dict.fromkeys(entries)]
    everyone, half = range(case.bs), case.bs // 2
    groups = [*([i] for i in kinds), kinds, everyone[:half], everyone[half:]]
    groups += [[i for i in everyone if i != left] for left in kinds]
    with_rows = (which for which in groups if which and (not case.new or any(case.new[i] for i in which)))
    yield from (_keep(case, which) for which in with_rows)


def _wrong(case: Fields) -> str:
    if not case.prefixes:
        return "a case needs at least one request"
    if case.bucket < case.bs:
        return f"bucket {case.bucket} is smaller than the batch of {case.bs} requests"
    return ""


REQUESTS = Feature(
    name="requests",
    order=20,
    fields=Without("`prefixes` and `rows` have an entry for each request."),
    wrong=_wrong,
    words=Without("The words of keys and rows have an entry for each request."),
    describe=Without("The phrases of keys and rows list the requests."),
    values=Without("The pattern of the prefixes determines the number of requests."),
    simpler=Simpler(
        value=lambda case: str(case.bs),
        of=lambda case: case.bs,
        reset=lambda case, minimal: _keep(case, [next(i for i, new in enumerate(case.new or (1,)) if new)]),
        size=lambda case, minimal: (case.bs,),
        steps=_fewer,
    ),
    random=Without("Random prefixes determine the number of requests."),
    varies="step",
    apply=Without("cases/plans.py makes the batches of all steps from the case's own."),
    **no_capability("No capability bounds the size of a batch."),
)
