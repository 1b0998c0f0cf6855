"""``check_backend`` hands on all that it is asked, and gives back all that it is told."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace as Of
from typing import Any

import pytest

from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.request import Options, Request

check_backend = importlib.import_module("attn_testkit.running.check_backend")


def row(case: str, status: Status = Status.PASSED) -> CaseResult:
    return CaseResult("m:A", "decode", "eager", case, status)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a judge was made with, asked, and told to end."""
    taken: list[Any] = []

    def judge_for(options: Options, device: str) -> Any:
        taken.append((options, device))
        return Of(run=run, close=lambda: taken.append("closed"))

    def prepare(judge: Any, request: Request) -> Any:
        taken.append(request)
        plan = Of(header="a header", name="a plan")
        ledger = Of(judge=lambda result: result)
        return Of(preset=[row("", Status.UNSUPPORTED)], plan=plan, items=["x", "y"], ledger=ledger, problems=list)

    def run(plan: Any, items: Any) -> Any:
        taken.append((plan.name, items))
        yield from (row(item) for item in items)

    monkeypatch.setattr(check_backend, "judge_for", judge_for)
    monkeypatch.setattr(check_backend, "prepare", prepare)
    return taken


def test_rows_that_are_known_come_first_and_the_judge_is_ended(asked: list[Any]) -> None:
    assert list(check_backend.check_backend("m:A")) == [row("", Status.UNSUPPORTED), row("x"), row("y")]
    assert asked == [
        (Options(diagnose_seconds=20.0), "auto"),
        Request(backends=(Candidate("m:A"),), command="check_backend", counts_tier=True),
        ("a plan", ["x", "y"]),
        "closed",
    ]


def test_everything_that_is_asked_for_is_handed_on(asked: list[Any]) -> None:
    check_backend.check_backend(
        "m:A", tier="core", device="cpu", modes=["decode"], executions=["eager"], seed=3, cases=["*"], jobs=2,
        timeout_s=7.0, in_process=True, known_failures="known.toml", diagnose="all", diagnose_seconds=3.0,
    )  # fmt: skip
    assert asked[:2] == [
        (Options(jobs=2, timeout_s=7.0, in_process=True, diagnose="all", diagnose_seconds=3.0), "cpu"),
        Request(
            (Candidate("m:A"),),
            ("decode",),
            ("eager",),
            tier="core",
            profile=None,
            device="cpu",
            seed=3,
            cases=("*",),
            command="check_backend",
            counts_tier=True,
            known_failures="known.toml",
        ),
    ]


def test_the_raising_form_takes_what_the_other_takes_and_hands_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (inspect.signature(f) for f in (check_backend.check_backend, check_backend.assert_conformant))
    assert one == other
    taken: list[Any] = []

    def handed(*backend: Any, **more: Any) -> Any:
        taken.append((backend, more))
        return True

    monkeypatch.setattr(check_backend, "check_backend", handed)
    more = {name: object() for name in one.parameters if name != "backend"}
    assert check_backend.assert_conformant("m:A", **more) is True  # type: ignore[arg-type,comparison-overlap]
    assert taken == [(("m:A",), more)]
