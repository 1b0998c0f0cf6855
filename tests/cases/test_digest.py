"""Digests of schedules and data: what they follow, and what they do not depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest
import torch

from attn_testkit.steps.digest import digest


class Order(Enum):
    FORWARDS = "forwards"


@dataclass(frozen=True)
class Held:
    rows: object = None
    order: Order = Order.FORWARDS
    names: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class HeldLater(Held):
    added: int = 0


def test_a_digest_follows_values_and_neither_the_class_nor_new_defaults() -> None:
    rows = np.arange(4)
    assert digest(Held(rows)) == digest(HeldLater(rows)) != digest(HeldLater(rows, added=1))
    others = [rows + 1, rows.astype(np.int32), rows.reshape(2, 2), torch.arange(4), torch.arange(4.0), [0, 1, 2, 3]]
    assert len({digest(Held(each)) for each in [rows, *others]}) == len(others) + 1
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2)), "bits count"
    assert digest({"a", "b"}) == digest({"b", "a"})
    with pytest.raises(TypeError, match="no value"):
        digest(object())
    assert digest(torch.arange(1).expand(1, 1)) == digest(torch.zeros(1, 1, dtype=torch.int64))
