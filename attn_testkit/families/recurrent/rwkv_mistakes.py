"""Usual mistakes of backends of RWKV-7, and the data that such a backend reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from .data import StateStepData
from .rwkv import RemovalSlip

_SLIPS: Mapping[RemovalSlip, str] = {
    "after the decay": "kappa reads the state after its decay: what is removed is read before it",
    "any length": "kappa is not divided by its length",
}


def mistaken_removals(data: StateStepData) -> Iterator[tuple[str, StateStepData]]:
    """Mistakes in gates and keys of RWKV-7; none for layers of other kinds."""
    if data.layers[0].k_k is None:
        return
    for slip, text in _SLIPS.items():
        yield text, replace(data, removal_slip=slip)
    yield "a and b are exchanged: the decay is computed from a, and eta from b", replace(data, k=data.v, v=data.k)
    for name, value, text in (
        ("k_k", torch.ones_like, "kappa is the key without its factors: k_k is not applied"),
        ("k_a", torch.zeros_like, "the key that is added is not scaled by eta: k_a is not applied"),
    ):
        changes: list[dict[str, Any]] = [{name: value(getattr(layer, name))} for layer in data.layers]
        layers = tuple(replace(layer, **each) for layer, each in zip(data.layers, changes, strict=True))
        yield text, replace(data, layers=layers)
