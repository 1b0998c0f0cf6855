"""Which step is planned while the device is still busy with the step before, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_testkit.runner_modes import overlap_scheduling
from attn_testkit.runner_modes.harness import StagedStep
from attn_testkit.runner_modes.messages import RunCase

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Execution
from attn_testkit.running.case_runs.worker_main import LocalWorker
from attn_testkit.running.planning.candidate import candidate_for
from attn_testkit.steps.schedule import make_schedule

OVERLAP_SCHEDULING = "decode-gqa2x2-d32-fp32-p16-k9.70.1.33-shuffled-gauss-b5prod-overlap_scheduling"
USUAL = OVERLAP_SCHEDULING.removesuffix("-overlap_scheduling")


class Notes(TorchNativeBackend):
    said: list[tuple[str, int]] = []  # noqa: RUF012

    def init_forward_metadata(self, batch: Any) -> None:
        self.said.append(("plan", batch.batch_size))
        super().init_forward_metadata(batch)

    def forward(self, q: Any, *args: Any, **kwargs: Any) -> Any:
        self.said.append(("forward", len(q)))
        return super().forward(q, *args, **kwargs)


def said_by(case: str) -> list[tuple[str, int]]:
    Notes.said.clear()
    LocalWorker(candidate_for(Notes, in_process=True), "cpu").drive(RunCase(case, Execution.EAGER))
    return list(Notes.said)


def test_an_eager_step_is_followed_by_the_plan_of_another_before_anybody_waits() -> None:
    step = [("plan", 4), ("forward", 4), ("forward", 4)]
    assert said_by(USUAL)[:6] == [*step, *step]
    assert said_by(OVERLAP_SCHEDULING)[:8] == [*step, ("plan", 3), *step, ("plan", 3)]


class StateNotes(TorchNativeStateBackend):
    said: list[str] = []  # noqa: RUF012

    def init_forward_metadata(self, batch: Any) -> None:
        self.said.append(f"plan {batch.batch_size}")
        super().init_forward_metadata(batch)

    def commit(self, steps: torch.Tensor, state: Any) -> None:
        self.said.append("commit")
        super().commit(steps, state)


def test_an_eager_draft_is_committed_before_the_next_step_is_planned() -> None:
    """SGLang's class commits with the metadata of its last plan, and its server commits before it plans again."""
    StateNotes.said.clear()
    case = (
        "target-verify-gdn4x2-d64-bf16-p16-k9.0.4-chain2-shuffled-like_keys-k64w4s32.zeroed-b4prod-overlap_scheduling"
    )
    LocalWorker(candidate_for(StateNotes, in_process=True), "cpu").drive(RunCase(case, Execution.EAGER))
    assert StateNotes.said[:3] == ["plan 3", "commit", "plan 2"]


@pytest.mark.parametrize(("bs", "indices"), [(1, (0,)), (2, (1,)), (4, (3, 2, 1))])
def test_the_next_step_has_other_requests_in_another_order(bs: int, indices: tuple[int, ...]) -> None:
    lens = ".".join(["9", "70", "1", "33"][:bs])
    schedule = make_schedule(parse_case(f"decode-gqa2x2-d32-fp32-p16-k{lens}-shuffled-gauss-b5prod-overlap_scheduling"))
    step = schedule.steps[0]
    staged = StagedStep(schedule, step, *[None] * 6)  # type: ignore[arg-type]
    following = overlap_scheduling.next_of(staged)
    assert following.step.part_of == (step, indices)
    assert [r.slots.tolist() for r in following.step.requests] == [step.requests[i].slots.tolist() for i in indices]
    assert following.data.q.shape[1] == len(indices)
    assert overlap_scheduling.plans_ahead(staged)


def test_without_a_request_or_another_way_nothing_is_planned_ahead() -> None:
    for case, live in ((USUAL, True), (f"{USUAL}-empty_batches", False)):
        schedule = make_schedule(parse_case(case))
        step = schedule.steps[0] if live else schedule.idle[0]
        assert not overlap_scheduling.plans_ahead(StagedStep(schedule, step, *[None] * 6))  # type: ignore[arg-type]


class ReadsTheTable(TorchNativeBackend):
    capabilities = TorchNativeBackend.capabilities.with_changes(server={"takes_rewritten_table": True})
    seen: list[list[int]] = []  # noqa: RUF012
    rows: list[int] = []  # noqa: RUF012

    def init_forward_metadata(self, batch: Any) -> None:
        super().init_forward_metadata(batch)
        self.seen.append(self.context.req_to_token[self.rows, 0].tolist())

    def forward(self, q: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        self.seen.append(self.context.req_to_token[self.rows, 0].tolist())
        return super().forward(q, *args, **kwargs)


@pytest.mark.parametrize(
    ("case", "takes", "rewritten"),
    [(OVERLAP_SCHEDULING, True, True), (USUAL, True, False), (OVERLAP_SCHEDULING, False, False)],
)
def test_a_servers_stream_rewrites_the_table_under_a_forward_and_puts_it_back(
    case: str, takes: bool, rewritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capabilities = ReadsTheTable.capabilities.with_changes(
        server={"takes_rewritten_table": takes, "eager_without_waits": False}
    )
    monkeypatch.setattr(ReadsTheTable, "capabilities", capabilities)
    ReadsTheTable.seen.clear()
    ReadsTheTable.rows[:] = [request.pool_row for request in make_schedule(parse_case(case)).steps[0].requests]
    LocalWorker(candidate_for(ReadsTheTable, in_process=True), "cpu").drive(RunCase(case, Execution.EAGER))
    plan, forward, _, after = ReadsTheTable.seen[:4]
    assert all(plan)
    assert forward == ([0] * 4 if rewritten else plan)
    assert after == plan
