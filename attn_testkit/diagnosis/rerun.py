"""Re-runs of a step with one thing changed, in the process that runs the backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Set

from ..cases.case import Case
from ..checks.observation import Observation
from ..contract import ForwardMode
from ..environment import Environment
from ..runner_modes.graphs import AllocatedInCapture, GraphRun
from ..runner_modes.messages import Rerun, RunRecord
from ..runner_modes.options import RunOptions
from ..steps.schedule import Schedule, Step

POISON, OTHER_FILL, CLEAR = 0xFF, 0xBC, 0x00
"""Bytes of uninitialized memory: NaN; a small number whose bits change when it is rounded to another dtype; zeros."""


class TimeUp(Exception):
    """Raised if the time of a diagnosis is up, so that nothing more is run for it."""


class Rerunner:
    """Re-runs of one backend, each on a fresh instance. A run that raises, crashes or hangs counts as wrong."""

    def __init__(
        self,
        drive: Callable[[Rerun], RunRecord],
        environment: Environment,
        eager_modes: Set[ForwardMode] = frozenset(ForwardMode),
        declared: Callable[[Case], bool] = lambda case: True,
        seconds: float | None = None,
    ) -> None:
        """``seconds``: time limit of the diagnosis, which begins now. None: no limit."""
        self._until = None if seconds is None else time.monotonic() + seconds
        self.may_be_cut = False
        """True as soon as the failing check is known: only the search for its cause may be cut."""
        self.was_cut = False
        """True if a run was refused because the time was up."""
        self._drive, self.environment, self._eager_modes = drive, environment, eager_modes
        self.grids: set[tuple[str, tuple[int, ...]]] = set()
        """Kernel and grid of the emulated Triton launches of all runs so far."""
        self.last_grids: tuple[tuple[str, tuple[int, ...]], ...] = ()
        """Launches of the last run likewise, in their order."""
        self.declared = declared
        """True if the backend declares what a case needs: only such cases are run."""

    def runs_eagerly(self, schedule: Schedule) -> bool:
        """True if the mode of a schedule is declared in eager."""
        return schedule.case.mode in self._eager_modes

    def eager(
        self,
        schedule: Schedule,
        step: Step,
        *,
        unowned: float | None = None,
        pattern: str | None = None,
        contiguous_heads: bool = False,
        most_programs: tuple[int, int] | None = None,
        pools_anywhere: bool = False,
        nothing_behind: bool = False,
        uncut: bool = False,
        wait_before_plans: bool = False,
        fill: int = POISON,
    ) -> Observation | None:
        """Run one eager step; None if it raised, or if the mode does not run eagerly."""
        if not self.runs_eagerly(schedule):
            return None
        options = RunOptions(
            pattern=pattern,
            contiguous_heads=contiguous_heads,
            most_programs=most_programs,
            pools_anywhere=pools_anywhere,
            nothing_behind=nothing_behind,
            uncut=uncut,
            wait_before_plans=wait_before_plans,
        )
        request = Rerun(schedule, step, options, unowned, fill)
        answer = self._ask(request, lambda _: step)
        return None if answer is None else answer[1][0]

    def graph(
        self,
        schedule: Schedule,
        *,
        unowned: float | None = None,
        pattern: str | None = None,
        poison_allocated: bool = True,
        copy_into_replaced: bool = False,
        restore_state: bool = False,
        restore_only: str = "",
        width_at_capture: bool = False,
        step_at_capture: bool = False,
        most_programs: tuple[int, int] | None = None,
        contiguous_heads: bool = False,
        programs_in_order: bool = False,
        nothing_behind: bool = False,
        uncut: bool = False,
        wait_before_plans: bool = False,
        fill: int = POISON,
    ) -> GraphRun | None:
        """Run all graphs, replays only; None if it raised."""
        options = RunOptions(
            pattern=pattern,
            poison_allocated=poison_allocated,
            watch_replaced=True,
            copy_into_replaced=copy_into_replaced,
            restore_state=restore_state,
            restore_only=restore_only,
            width_at_capture=width_at_capture,
            step_at_capture=step_at_capture,
            most_programs=most_programs,
            contiguous_heads=contiguous_heads,
            programs_in_order=programs_in_order,
            nothing_behind=nothing_behind,
            uncut=uncut,
            wait_before_plans=wait_before_plans,
            eager_steps=False,
        )
        answer = self._ask(Rerun(schedule, None, options, unowned, fill), schedule.step_named)
        if answer is None:
            return None
        record, seen = answer
        return GraphRun(
            observed=tuple((schedule, observed) for observed in seen),
            fill=record.fill,
            allocated_in_capture=tuple(AllocatedInCapture(*each) for each in record.allocated_in_capture),
            replaced=record.replaced,
            restored=record.restored,
        )

    def _ask(self, request: Rerun, step_of: Callable[[str], Step]) -> tuple[RunRecord, list[Observation]] | None:
        """Replace the copies of steps in an answer by the judge's own steps, because answers are looked up by
        identity."""
        if self.may_be_cut and self._until is not None and time.monotonic() > self._until:
            self.was_cut = True
            raise TimeUp
        run_record = self._drive(request)
        self.last_grids = run_record.grids
        self.grids.update(run_record.grids)
        if not run_record.records:
            return None
        return run_record, [
            Observation(
                request.schedule,
                step_of(record.step),
                record.label,
                record.copies,
                record.ran_before,
                damaged=record.damaged,
                replay=record.replay,
                padded=record.padded,
            )
            for record in run_record.records
        ]
