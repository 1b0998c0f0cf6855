"""Cases that lanes draw are those that the runner's own process would draw, and a lost lane costs none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.catalogue import tiers as catalogue
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.running.case_runs import drawing, loop
from attn_testkit.running.case_runs.drawing import draw_in_lanes
from attn_testkit.running.case_runs.lane_process import LaneProcess
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.request import Options, Request

DECLARED = TorchNativeBackend.capabilities


@pytest.fixture
def lanes() -> Iterator[list[LaneProcess]]:
    made = [LaneProcess(Options(jobs=2)) for _ in range(2)]
    generate.cache.clear()
    yield made
    for lane in made:
        lane.close()


def drawn_here(monkeypatch: pytest.MonkeyPatch) -> list[ForwardMode]:
    """Modes that are drawn in this process from now on."""
    seen: list[ForwardMode] = []
    real = catalogue.array_of

    def noted(declared, mode, tier):
        seen.append(mode)
        return real(declared, mode, tier)

    monkeypatch.setattr(catalogue, "array_of", noted)
    return seen


def test_lanes_draw_most_modes_and_planning_draws_none_again(lanes, monkeypatch):
    seen = drawn_here(monkeypatch)
    draw_in_lanes(lanes, DECLARED, Request(("m:A",), seed=3))
    assert len(seen) == 2, "a third of six modes"
    found = {mode: generate(DECLARED, mode, "smoke", 3) for mode in ForwardMode}
    assert len(seen) == 2
    generate.cache.clear()
    assert found == {mode: generate(DECLARED, mode, "smoke", 3) for mode in ForwardMode}


def test_only_modes_that_are_asked_for_are_drawn(lanes, monkeypatch):
    seen = drawn_here(monkeypatch)
    draw_in_lanes(lanes, DECLARED, Request(("m:A",), modes=("decode",)))
    assert seen == [ForwardMode.DECODE]
    assert all(lane.child is None for lane in lanes)


def test_a_lane_that_is_lost_leaves_its_modes_to_the_runner(lanes, monkeypatch):
    seen = drawn_here(monkeypatch)

    def killed(self: LaneProcess, *values: object) -> bool:
        asked = real(self, *values)
        assert self.child is not None
        self.child._process.kill()
        return asked

    real = LaneProcess.draw
    monkeypatch.setattr(drawing.LaneProcess, "draw", killed)
    draw_in_lanes(lanes[:1], DECLARED, Request(("m:A",)))
    assert len(seen) == 3
    assert all(generate(DECLARED, mode, "smoke", 0) for mode in ForwardMode)
    assert len(seen) == 6


@pytest.mark.parametrize("tier", ["smoke", "core"])
def test_with_several_jobs_the_lanes_draw_the_cases_of_every_tier(monkeypatch, tier):
    asked = []
    monkeypatch.setattr(
        loop, "draw_in_lanes", lambda lanes, declared, request: asked.append((len(lanes), request.tier))
    )
    runner = Runner(Options(jobs=2))
    monkeypatch.setattr(runner, "declared", lambda *_: DECLARED)
    runner._capabilities_for(Candidate("m:A"), Request(("m:A",), tier=tier))
    runner.close()
    assert asked == [(2, tier)]
