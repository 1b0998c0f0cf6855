"""A mode whose kernels a device does not have is not run there, and the report says why."""

from typing import ClassVar

import pytest
from in_process import plan_run

from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode, Requires
from attn_testkit.environment import Environment, missing_here
from attn_testkit.examples.minimal import MinimalBackend
from attn_testkit.results.case_result import Status

CONTEXT_ONLY = Requires(sm=(100, 103), why="no such kernel below SM100")


class Partly(MinimalBackend):
    """Draft-extend v1 needs a device that the other modes do not."""

    capabilities: ClassVar[Capabilities] = MinimalBackend.capabilities.with_changes(
        eager=frozenset(ForwardMode),
        requires=Requires(sm=((90, 90), (100, 103))),
        mode_requires={ForwardMode.DRAFT_EXTEND: CONTEXT_ONLY},
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setattr(Environment, "sm", property(lambda self: 90))
    return Environment(emulated=True)


def test_only_the_mode_without_kernels_is_not_run(hopper: Environment) -> None:
    plan = plan_run(backends=["test_requirements:Partly"], executions=["eager"], device="cpu")
    (row,) = [row for row in plan.preset if row.status is Status.NOT_RUN_HERE]
    assert row.mode == "draft-extend"
    assert row.reason == "needs SM100-SM103, this device is SM90 (no such kernel below SM100)"
    assert {item.mode for item in plan.items} == set(ForwardMode) - {ForwardMode.DRAFT_EXTEND}


def test_a_device_outside_every_range_runs_nothing(hopper: Environment) -> None:
    declared = Partly.capabilities.with_changes(requires=Requires(sm=((80, 86), (100, 103))))
    assert missing_here(declared, hopper) == "needs SM80-SM86, SM100-SM103, this device is SM90"


def test_without_a_device_nothing_is_missing_but_packages() -> None:
    environment = Environment(emulated=True)
    assert missing_here(Partly.capabilities, environment, ForwardMode.DRAFT_EXTEND) == ""
    declared = Partly.capabilities.with_changes(
        mode_requires={ForwardMode.DECODE: Requires(packages=("no-such-thing>1",))}
    )
    assert missing_here(declared, environment, ForwardMode.DECODE) == "no-such-thing>1 is not installed"
    assert missing_here(declared, environment, ForwardMode.TARGET_VERIFY) == ""


@pytest.mark.parametrize(
    ("sm", "runs", "does_not"),
    [(None, (80, 90, 120), ()), ((90, 90), (90,), (89, 100)), (((90, 90), (100, 103)), (90, 101), (91, 99, 120))],
)
def test_ranges_of_compute_capability_include_their_ends(sm: object, runs: tuple[int], does_not: tuple[int]) -> None:
    requires = Requires(sm=sm)  # type: ignore[arg-type]
    assert all(requires.runs_on(value) for value in runs)
    assert not any(requires.runs_on(value) for value in does_not)


def test_capabilities_with_requirements_of_modes_can_still_be_looked_up() -> None:
    assert generate(Partly.capabilities, ForwardMode.DECODE, "smoke")
