"""Which short runs of keys are tried as an explanation of an error."""

import pytest
import torch

from attn_testkit.checks.miscounts import _SHORT, _short_runs


def _runs(worth: torch.Tensor) -> set[tuple[int, int]]:
    return {(first, last) for first, last in _short_runs(worth).T.tolist()}


@pytest.mark.parametrize("length", [1, 2, _SHORT - 1, _SHORT])
def test_the_best_run_is_tried_up_to_the_longest_that_is_short(length: int) -> None:
    worth = torch.zeros(5000)
    worth[3000 + length :] = 1.0
    worth[3000 + length] = 2.0
    assert (3000, 3000 + length) in _runs(worth)


def test_no_run_is_longer_than_a_short_one() -> None:
    runs = _runs(torch.arange(5000.0))
    assert max(last - first for first, last in runs) == _SHORT


@pytest.mark.parametrize("keys", [1, 2, 3, 200])
def test_runs_end_with_the_last_key_and_not_behind_it(keys: int) -> None:
    worth = torch.zeros(keys + 1)
    worth[-1] = 1.0
    runs = _runs(worth)
    assert (keys - 1, keys) in runs
    assert all(first < last <= keys for first, last in runs)
