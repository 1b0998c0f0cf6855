"""Softmax attention as a family: the record in which its parts come together."""

from __future__ import annotations

from ...cases.features.table import FEATURES
from ...cases.fields import Changes, Fields, Heads
from ...steps.data import make_layers, make_step_data
from ...steps.greedy_loop import data_of_tokens, make_vocabulary
from ..family import Beside, Family, Question, Texts
from .answer import answer
from .memory import KV_POOL


def _beside_states(case: Fields) -> Changes:
    """Changes to as many query heads as value heads, as many KV heads as key heads, and data without decays."""
    q_heads, kv_heads = case.heads.q_heads, case.heads.kv_heads
    family = "mha" if q_heads == kv_heads else "mqa" if kv_heads == 1 else "gqa"
    return {"heads": Heads(family, q_heads, kv_heads), "state": None, "data": "gauss"}


SOFTMAX = Family(
    name="softmax",
    features=frozenset(feature.name for feature in FEATURES),
    layers=make_layers,
    data=make_step_data,
    memory=KV_POOL,
    answer=answer,
    texts=Texts(vocabulary=make_vocabulary, data=data_of_tokens),
    questions=frozenset(Question),
    beside=Beside(features=frozenset({"KV layout"}), changes=_beside_states, poisoned="KV slots that nobody owns"),
    counts_keys=True,
)
