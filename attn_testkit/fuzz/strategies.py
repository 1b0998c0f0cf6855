"""Random cases of a mode, over everything that is declared. Hypothesis shrinks them to the minimal case.

Each list begins with its simplest value, so a shrunk failure has few values that are not the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import strategies as st

from ..cases.case import Case
from ..cases.features.heads import smallest_heads_first
from ..catalogue.minimal import drawn_case
from ..contract import Capabilities, ForwardMode
from ..families.table import meaningful

T = TypeVar("T")


@dataclass(frozen=True)
class _Draws:
    """Interface of Hypothesis for features."""

    draw: st.DrawFn

    def one_of(self, values: Sequence[T], /) -> T:
        return self.draw(st.sampled_from(values))

    def number(self, low: int, high: int, /) -> int:
        return self.draw(st.integers(low, high))

    def numbers(self, count: tuple[int, int], *ranges: tuple[int, int]) -> tuple[int, ...]:
        each = st.one_of(*(st.integers(low, high) for low, high in ranges))
        return tuple(self.draw(st.lists(each, min_size=count[0], max_size=count[1])))


def random_cases(declared: Capabilities, mode: ForwardMode) -> st.SearchStrategy[Case]:
    """Cases of a mode. Raises ``ValueError`` if the other capabilities allow none."""
    if not smallest_heads_first(declared):
        raise ValueError(f"{mode} is declared, but no head layout that goes with it is")
    # Cases longer than declared are drawn again: few are, and their length depends on all fields.
    return _cases(declared, mode).filter(lambda case: case.context_len <= declared.bounds.max_context_len)


@st.composite
def _cases(draw: st.DrawFn, declared: Capabilities, mode: ForwardMode) -> Case:
    return meaningful(drawn_case(_Draws(draw), declared, mode))


def differences(case: Case, minimal: Case) -> list[str]:
    """Names of the fields that differ from the minimal case of the mode."""
    simplest = minimal.values
    return [name for name, value in case.values.items() if value != simplest[name]]
