"""Survivors that are probably equivalent: a guess for readers of the list, not a verdict."""

from __future__ import annotations

import re
from collections.abc import Callable

from .operators import Mutant

_MAKES_A_TENSOR = re.compile(r"\b(zeros|ones|empty|full|arange)\(|\bnew_(zeros|empty|full)\(|_BYTES\b|workspace", re.I)


def _is_larger(mutant: Mutant) -> bool:
    """One more than before, in a line that makes a tensor."""
    grows = mutant.operator in ("constant", "slice") or (mutant.operator == "arithmetic" and " - " in mutant.was)
    return grows and bool(_MAKES_A_TENSOR.search(mutant.was))


def _is_wider(mutant: Mutant) -> bool:
    widths = (("int32", "int64"), (".int()", ".long()"))
    return mutant.operator == "dtype" and any(
        mutant.was.count(narrow) > mutant.becomes.count(narrow) and mutant.was.count(wide) < mutant.becomes.count(wide)
        for narrow, wide in widths
    )


def _drops_a_copy(mutant: Mutant) -> bool:
    return mutant.operator == "in-place" and bool(re.search(r"\.(clone|contiguous|copy)\(\)", mutant.was))


def _moves_a_limit(mutant: Mutant) -> bool:
    return mutant.operator in ("in-place", "element", "constant") and bool(
        re.search(r"\b(clamp|min|max)\(", mutant.was)
    )


def _tunes(mutant: Mutant) -> bool:
    return mutant.operator in ("constant", "arithmetic") and bool(re.search("block|tile", mutant.was, re.IGNORECASE))


_SUSPICIONS: tuple[tuple[str, Callable[[Mutant], bool]], ...] = (
    ("an error that no healthy step provokes", lambda mutant: mutant.was.startswith(("raise ", "warnings."))),
    ("more memory than is used", _is_larger),
    ("the same numbers in a wider integer", _is_wider),
    ("a copy of what nobody writes to", _drops_a_copy),
    ("a limit that nothing comes near", _moves_a_limit),
    ("a tuning number of a kernel", _tunes),
)
"""Pairs (words, condition); the first that applies is printed."""


def suspicion(mutant: Mutant) -> str:
    """Reason why a survivor may not be a bug; empty if there is none."""
    return next((words for words, applies in _SUSPICIONS if applies(mutant)), "")
