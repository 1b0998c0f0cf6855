"""The context: the longest request of any step, which follows from all other features."""

from __future__ import annotations

from ...contract import Capabilities
from ..fields import Fields
from ..plan import most_context
from .feature import Asked, Covered, Feature, Without

_REGIONS = 6
"""Pages that a draft may use after its prefix."""


def _tried(declared: Capabilities, case: Fields) -> int:
    """All declared tokens, if the longest request and its new rows fill them. Otherwise the prefix and the first of the
    new tokens: the number of further new tokens does not matter.
    """
    most = max(case.prefixes) + 1
    if most < declared.bounds.max_context_len - _REGIONS * case.page_size:
        return most
    return max(most, case.context_len)


def _declared(declared: Capabilities, case: Fields) -> bool:
    most, bound = declared.bounds.max_context_len, most_context(case)
    return (bound is not None and bound <= most) or case.context_len <= most


CONTEXT = Feature(
    name="context",
    order=350,
    fields=Without("It follows from the lengths, the rows and the page size."),
    words=Without("It follows from the lengths, the rows and the page size."),
    describe=Without("The steps that `explain` prints begin with it."),
    declared=(Asked(lambda case: "as many tokens of context", _declared),),
    fit=Without("The catalogue leaves out what is longer than the declared context."),
    values=Without("Columns of keys count as lengths."),
    covered=(
        Covered(
            "context",
            "tokens of context",
            lambda declared, mode: (declared.bounds.max_context_len,),
            _tried,
            Without("catalogue/full_contexts.py has a full context if it is short enough."),
            bound=True,
        ),
    ),
    simpler=Without("It follows from the lengths, the rows and the page size."),
    undeclared=Without("A context that is longer than declared has the same tensors as a shorter one."),
    random=Without("It follows from the lengths, the rows and the page size."),
    varies="instance",
    apply=Without("cases/plans.py computes it from all steps."),
)
