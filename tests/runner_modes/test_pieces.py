"""Piecewise graphs: what attention is given between them, and what they read of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.pieces import Pieces

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.steps.schedule import Schedule, make_schedule
from cuda_on_cpu import emulated_cuda

CASE = "extend-mqa4-d32-bf16-p16-k9.70.1-n2a2x3-shuffled-gauss-b4prod-{}piecewise"


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulated_cuda():
        yield


class Remembers(TorchNativeBackend):
    """Healthy; keeps the memory of each q and of each output that it was lent."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.given: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **named: Any) -> Any:
        self.given.append((q, named.get("out")))
        return super().forward(q, k, v, layer, batch, save_kv_cache, **named)


def ran(words: str) -> tuple[ServerHarness, Schedule]:
    """The first step, a step of more rows, and the first again."""
    schedule = make_schedule(parse_case(CASE.format(words)))
    harness = ServerHarness(Remembers, [schedule], torch.device("cuda"))
    for step in (schedule.steps[0], schedule.steps[1], schedule.steps[0]):
        run_eager(harness, schedule, step, Clock())
    return harness, schedule


def behind(q: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows [rows - T, Hq, D] behind those of q, in its memory."""
    return q.as_strided((rows, *q.shape[1:]), q.stride())[len(q) :]


@pytest.mark.parametrize(("words", "padded"), [("", 0), ("given_out-padded_tokens-", 3)])
def test_steps_share_the_memory_of_q_and_of_outputs_and_nan_follows_their_rows(words: str, padded: int) -> None:
    harness, schedule = ran(words)
    (pieces,) = harness.pieces.values()
    given = harness.backend.given  # type: ignore[attr-defined]
    layers = len(harness.context.layers)
    first, second, again = (given[i : i + layers] for i in (0, layers, 2 * layers))
    assert [len(q) for q, _ in first] == [schedule.steps[0].tokens + padded] * layers
    assert len(second[0][0]) > len(first[0][0])
    for (q, out), (more, other), (same, _) in zip(first, second, again, strict=True):
        assert q.data_ptr() == more.data_ptr() == same.data_ptr()
        assert behind(q, len(pieces.outputs[0].rows)).isnan().all()
        assert (out is None) == (padded == 0)
        if out is not None and other is not None:
            assert out.data_ptr() == other.data_ptr() in {each.rows.data_ptr() for each in pieces.outputs}


@pytest.mark.parametrize(("tokens", "rows"), [(0, 16), (1, 16), (16, 16), (17, 32), (64, 64), (65, 128)])
def test_pieces_have_a_power_of_two_of_rows_and_room_for_the_step(tokens: int, rows: int) -> None:
    assert Pieces.rows_for(tokens) == rows
