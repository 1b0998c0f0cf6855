"""Texts of layers with states: a token's activations follow from its id, and a text begins from zeros."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ...cases.case import Case
from ...cases.normals import normals
from ...steps.data import DTYPES, HIDDEN, VOCAB
from ...steps.greedy_loop import Vocabulary
from ...steps.schedule import Schedule
from .data import End, StateStepData, activations, shape_of, state_layers


def make_state_vocabulary(case: Case) -> Vocabulary:
    """The activations of every token id: ``q``, ``k``, ``v`` are ``mixed``, ``a``, ``b``, [L, VOCAB, n]."""
    seed = case.digest ^ 0x0CAB
    mixed, a, b = activations(case, VOCAB, (seed % 2**32, 0))
    return Vocabulary(mixed, a, b, normals((VOCAB, HIDDEN), np.random.default_rng(seed)))


def data_of_state_tokens(schedule: Schedule, tokens: Sequence[Sequence[int]]) -> StateStepData:
    """Input of the oracle for plain decode of texts: a row for each token, on the state after the tokens before it."""
    case, shape = schedule.case, shape_of(schedule.case)
    words, layers, news = make_state_vocabulary(case), state_layers(case), tuple(len(text) for text in tokens)
    ids = torch.tensor([token for text in tokens for token in text], dtype=torch.int64)
    request = torch.arange(len(news)).repeat_interleave(torch.tensor(news))
    first = torch.tensor([0, *accumulate(news)])[:-1]
    place = torch.arange(len(ids)) - first[request]
    one, count = layers[0], len(layers)
    none = torch.empty(count, len(news), 0, 1, 1)
    return StateStepData(
        q=words.q[:, ids], k=words.k[:, ids], v=words.v[:, ids], hidden=words.hidden[ids],
        stored_keys=none, stored_values=none, kv_scales=torch.ones(2, count, 1, 1, 1, 1, dtype=torch.float64),
        visible=torch.zeros(len(news), max(news), 0, dtype=torch.bool),
        key_positions=torch.zeros(len(news), 0, dtype=torch.int64),
        query_positions=torch.arange(max(news)).expand(len(news), -1), row_request=request, row_offset=place,
        row_key=place, positions=place, out_cache_loc=torch.zeros_like(place),
        fresh=torch.ones(len(news), dtype=torch.bool),
        states=torch.zeros(count, len(news), one.state_heads, one.v_dim, one.k_dim, dtype=DTYPES[shape.dtype]),
        windows=torch.zeros(count, len(news), one.parts[0], shape.conv_width - 1, dtype=DTYPES[case.dtype]),
        layers=layers, products=schedule.numerics.state_products, conv_products=schedule.numerics.conv_products,
        dtype=case.dtype, shape=shape, news=news, kept=news, lists=np.zeros((len(news), 1), np.int64),
        taken=(1,) * len(news), ends=tuple(End(0, text, count) for text, count in enumerate(news)), stored_each=True,
    )  # fmt: skip
