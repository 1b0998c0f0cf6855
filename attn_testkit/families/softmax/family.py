"""Softmax attention as a family: the record in which its parts come together."""

from __future__ import annotations

from ...cases.features.table import FEATURES
from ...steps.data import make_layers, make_step_data
from ...steps.greedy_loop import data_of_tokens, make_vocabulary
from ..family import Family, Question, Texts
from .answer import answer
from .memory import KV_POOL

SOFTMAX = Family(
    name="softmax",
    features=frozenset(feature.name for feature in FEATURES),
    layers=make_layers,
    data=make_step_data,
    memory=KV_POOL,
    answer=answer,
    texts=Texts(vocabulary=make_vocabulary, data=data_of_tokens),
    questions=frozenset(Question),
    counts_keys=True,
)
