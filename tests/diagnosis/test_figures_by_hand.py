"""What a record keeps of a wrong step, for plots: every number by hand, and never more than fits."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_testkit.checks.comparison import Ratios
from attn_testkit.diagnosis.attended_keys import AttendedKeys
from attn_testkit.diagnosis.figures import error_map, key_map
from attn_testkit.results.finding import KeyMap


def evaluated(element: torch.Tensor, row: torch.Tensor | None = None, requests: list[int] | None = None) -> Any:
    """A judgement of nothing but ratios. ``element`` [L, T, Hq, Dv], ``row`` [L, T, Hq]."""
    rows = element.shape[1]
    row = torch.zeros(element.shape[:3]) if row is None else row
    data = SimpleNamespace(row_request=torch.tensor(list(range(rows)) if requests is None else requests))
    ratios, keys = Ratios(element.double(), row.double()), torch.zeros(element.shape[:3], dtype=torch.float64)
    return SimpleNamespace(ratios=ratios, key_ratio=keys, expected=SimpleNamespace(data=data))


def test_a_cell_is_the_largest_ratio_of_a_row_and_head_over_layers_and_dims_and_of_its_norm():
    element, row = torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2)
    element[0, 0, 1, 3], element[1, 0, 1, 0] = 2.0, 1.5
    row[1, 2, 0] = 1.25
    step = evaluated(element, row, [0, 0, 5])
    assert error_map(step).ratios == ((0.0, 2.0), (0.0, 0.0), (1.25, 0.0))
    step.key_ratio[1, 1, 1] = 1.75
    found = error_map(step)
    assert found.ratios == ((0.0, 2.0), (0.0, 1.75), (1.25, 0.0)), "counts of KV tokens have a limit too"
    assert (found.requests, found.rows, found.heads) == ((0, 0, 5), 3, 2)


def test_numbers_are_short_and_nan_is_more_than_any():
    element = torch.zeros(1, 1, 3, 1)
    element[0, 0, :, 0] = torch.tensor([1.23456, 987654.0, torch.inf])
    assert error_map(evaluated(element)).ratios == ((1.23, 988000.0, 1e9),)


@pytest.mark.parametrize(
    ("count", "cells", "each"), [(1, 1, 1), (32, 32, 1), (33, 17, 2), (64, 32, 2), (65, 22, 3), (1000, 32, 32)]
)
def test_of_more_rows_or_heads_than_fit_neighbours_share_a_cell_that_holds_the_largest(count, cells, each):
    element = torch.arange(count, dtype=torch.float64).reshape(1, count, 1, 1)
    largest = tuple(float(min(start + each, count) - 1) for start in range(0, count, each))
    by_row = error_map(evaluated(element))
    assert len(by_row.ratios) == cells == len(largest)
    assert tuple(ratio for (ratio,) in by_row.ratios) == largest
    assert by_row.requests == tuple(range(0, count, each))
    assert by_row.rows == count
    (by_head,) = error_map(evaluated(element.transpose(1, 2))).ratios
    assert by_head == largest


def test_a_map_is_small_in_a_record():
    element = torch.full((2, 132, 128, 8), 123456.0)
    assert len(json.dumps(asdict(error_map(evaluated(element))), separators=(",", ":"))) < 10_000


ASKED = AttendedKeys(
    request=1, row=2, used=frozenset({0, 1, 2, 7}), wanted=frozenset(range(9)), doubled=frozenset({1}),
    looked_at=frozenset(range(9)), length=12, elsewhere={}, total=None, head=3,
)  # fmt: skip


def test_keys_are_kept_as_runs():
    assert key_map(ASKED) == KeyMap(1, 2, 3, 12, ((0, 2), (7, 7)), ((0, 8),), ((1, 1),), ((9, 11),))
    none = replace(ASKED, used=frozenset(), doubled=frozenset(), looked_at=frozenset(range(12)))
    assert key_map(none) == KeyMap(1, 2, 3, 12, (), ((0, 8),))
