"""Softmax attention as a family: the record in which its parts come together."""

from __future__ import annotations

from ...cases.data import StepData, make_layers, make_step_data, new_kv
from ...cases.dimensions.table import DIMENSIONS
from ..family import Family, Question, Stored
from .answer import answer
from .memory import watch_of

__all__ = ["SOFTMAX", "stored_kv_rows"]


def stored_kv_rows(data: StepData) -> Stored:
    """K and V of the new rows, as the KV pool holds them."""
    return Stored(*new_kv(data))


SOFTMAX = Family(
    name="softmax",
    dimensions=frozenset(dimension.name for dimension in DIMENSIONS),
    layers=make_layers,
    data=make_step_data,
    memory=watch_of,
    stored=stored_kv_rows,
    answer=answer,
    questions=frozenset(Question),
    counts_keys=True,
)
