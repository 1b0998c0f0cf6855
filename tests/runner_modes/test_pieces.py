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
        self.planned: list[tuple[int, int, list[int]]] = []

    def init_forward_metadata(self, batch: Any) -> None:
        self.planned.append((batch.batch_size, len(batch.input_ids), list(batch.extend_prefix_lens_cpu)))
        super().init_forward_metadata(batch)

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
    first, second, again = (given[i : i + layers] for i in range(len(given) - 3 * layers, len(given), layers))
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


def test_a_capture_plans_one_prompt_without_a_prefix_for_each_number_of_rows_and_runs_it_before_any_request() -> None:
    harness, schedule = ran("")
    backend: Any = harness.backend
    layers, sizes = len(harness.context.layers), sorted({rows for rows, _ in harness.pieces}, reverse=True)
    dummies, live = backend.planned[: len(harness.pieces)], backend.planned[len(harness.pieces) :]
    assert dummies == [
        (1, min(rows, harness.context.max_extend_tokens), [0]) for rows, _ in sorted(harness.pieces, reverse=True)
    ]
    assert sizes[0] >= max(step.tokens for step in schedule.every_step)
    assert [bs for bs, _, _ in live] == [schedule.steps[0].bs, schedule.steps[1].bs, schedule.steps[0].bs]
    assert len(backend.given) == (3 * len(dummies) + 3) * layers


def test_a_server_that_gives_the_memory_of_outputs_captures_without_attention() -> None:
    harness, _ = ran("given_out-padded_tokens-")
    backend: Any = harness.backend
    assert len(backend.planned) == 3
