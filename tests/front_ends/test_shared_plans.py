"""Plans that workers of xdist share: read by all, made by one, and never another's."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runner import Runner

from attn_testkit.plugin.shared_plans import SharedPlans
from attn_testkit.registry import UsageError
from attn_testkit.running.planning.request import Options, Plan, Request

REQUEST = Request(("fake:ok,ok",), device="cpu")
PLAN = Runner(Options()).plan(REQUEST)


def none() -> Plan:
    raise AssertionError("it is made already")


def test_the_second_worker_has_what_the_first_one_made(tmp_path: Path) -> None:
    assert SharedPlans(str(tmp_path)).plan(REQUEST, lambda: PLAN) is PLAN
    assert SharedPlans(str(tmp_path)).plan(replace(REQUEST), none) == PLAN


@pytest.mark.parametrize("change", [{"seed": 1}, {"cases": ("decode-*",)}, {"backends": ("fake:ok,wrong",)}])
def test_another_request_has_its_own(tmp_path: Path, change: dict[str, object]) -> None:
    plans, other = SharedPlans(str(tmp_path)), replace(PLAN, items=PLAN.items[:1])
    plans.plan(REQUEST, lambda: PLAN)
    assert plans.plan(replace(REQUEST, **change), lambda: other) is other
    assert plans.plan(REQUEST, none) == PLAN


@pytest.mark.parametrize("content", [b"", pickle.dumps(PLAN)[:-9], b"not a pickle", pickle.dumps("no plan")])
def test_a_file_with_something_else_is_made_anew(tmp_path: Path, content: bytes) -> None:
    plans = SharedPlans(str(tmp_path))
    plans.plan(REQUEST, lambda: PLAN)
    (place,) = (path for path in tmp_path.iterdir() if not path.suffix)
    place.write_bytes(content)
    assert plans.plan(REQUEST, lambda: PLAN) is PLAN
    assert plans.plan(REQUEST, none) == PLAN


@pytest.mark.parametrize("folder", ["", "/of/another/machine"])
def test_without_a_folder_every_plan_is_made(folder: str) -> None:
    plans, made = SharedPlans(folder), list[Plan]()
    for _ in range(2):
        plans.plan(REQUEST, lambda: made.append(PLAN) or PLAN)  # type: ignore[func-returns-value]
    assert len(made) == 2


def test_a_request_that_cannot_be_planned_is_refused_in_each_worker_and_locks_nobody_out(tmp_path: Path) -> None:
    def refuse() -> Plan:
        raise UsageError("no such backend")

    for _ in range(2):
        with pytest.raises(UsageError, match="no such backend"):
            SharedPlans(str(tmp_path)).plan(REQUEST, refuse)
    assert SharedPlans(str(tmp_path)).plan(REQUEST, lambda: PLAN) is PLAN


def test_one_that_needs_a_plan_waits_for_who_makes_it(tmp_path: Path) -> None:
    begun, found = threading.Event(), list[Plan]()

    def slowly() -> Plan:
        begun.set()
        time.sleep(0.2)
        return PLAN

    first = threading.Thread(target=lambda: SharedPlans(str(tmp_path)).plan(REQUEST, slowly))
    first.start()
    assert begun.wait(60)
    found.append(SharedPlans(str(tmp_path)).plan(REQUEST, none))
    first.join()
    assert found == [PLAN]


ENDS = """
import os, sys
from attn_testkit.plugin.shared_plans import SharedPlans
from attn_testkit.running.planning.request import Request
SharedPlans(sys.argv[1]).plan(Request(("fake:ok,ok",), device="cpu"), lambda: os._exit(7))
"""


def test_a_worker_that_ends_while_it_plans_leaves_it_to_the_next(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], check=False).returncode == 7
    assert len(list(tmp_path.iterdir())) == 1, "the lock of the same request"
    assert SharedPlans(str(tmp_path)).plan(REQUEST, lambda: PLAN) is PLAN
    assert len(list(tmp_path.iterdir())) == 2
