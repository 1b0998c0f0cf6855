"""The only loop over case-runs: it turns items into results, whatever the backends do. It does not print, and does not
use pytest. It passes case-runs to lanes and collects their results. A lane has at most one worker, and a worker has one
backend for all its life.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial

from ...cases.case import parse_case
from ...contract import Capabilities
from ...environment import resolve
from ...registry import UsageError, capabilities_line
from ...results.case_result import CaseResult
from ...runner_modes.messages import Described
from ..planning.candidate import Candidate
from ..planning.plan import plan_run
from ..planning.request import Item, Options, Plan, Request, not_started, once_more
from ..processes.exits import refuse_success_by_exit
from ..processes.mps import Sharing, begin_sharing, without_daemon
from ..processes.worker_process import WorkerStartError
from .between_cases import Afresh
from .drawing import draw_in_lanes
from .lane import OF_DRIVER, Lane, Lost, Work
from .lane_process import LaneProcess, ready
from .waiting import Waiting, groups_of
from .worker_slot import named_request


def _nothing() -> None:
    pass


class Runner:
    """Plans in this process; backends run in their own processes, unless ``options.in_process``.

    Used by one thread; another may close it.
    """

    def __init__(self, options: Options | None = None, *, apart: bool = False) -> None:
        """``apart``: a single lane is also a separate process, for runners in several threads of one process."""
        self.options = options or Options()
        self._apart = not self.options.in_process and (apart or self.options.jobs > 1)
        if self.options.in_process:
            refuse_success_by_exit()
        self._described: dict[Candidate, Described] = {}
        self._lanes: dict[int, Lane | LaneProcess] = {}
        self._afresh = Afresh()
        self._sharing: Sharing | None = None
        self._begun = time.monotonic() - self.options.spent_s
        self.note: Callable[[str], None] = lambda text: None
        """Called with a text about what happens between two results, such as a diagnosis."""
        self.begun: Callable[[Item], None] = lambda item: None
        """Called with each case-run that is passed to a lane."""
        self._closed = False

    def plan(self, request: Request) -> Plan:
        """Decide what to run. Imports every backend, each in its own process. Raises ``UsageError``."""
        self._share(request.device)
        self._start_first(request)
        resolve(request.device).prepare_process()
        for name in self.options.after:
            try:
                parse_case(named_request(name).case)
            except ValueError as error:
                raise UsageError(f"--after: {error}") from None
        plan = plan_run(
            request,
            lambda candidate: self._capabilities_for(candidate, request),
            lambda candidate: dict(self._described[candidate].broken_packages),
            lambda candidate: self._described[candidate].notes,
            lambda candidate: self._described[candidate].source,
        )
        words = self._sharing.words if self._sharing and plan.header.device == "cuda" else ""
        return replace(plan, header=replace(plan.header, sharing=words))

    def _share(self, device: str) -> None:
        """Decide, once, how lanes share a GPU: before any worker asks for it. Raises ``UsageError``."""
        if self._sharing is None and not self.options.in_process:
            options = self.options
            self._sharing = begin_sharing(options.mps, options.jobs, options.gpus, device, os.environ)

    def _capabilities_for(self, candidate: Candidate, request: Request) -> Capabilities:
        """Return what a backend declares. The other workers of the run import the backend while the plan is made."""
        alone = len(request.candidates) == 1 and not request.cases and not self.options.in_process
        several = alone and self.options.jobs > 1
        declared = self.declared(
            candidate, request.device, partial(self._start_others, candidate, request.device) if several else _nothing
        )
        if alone and self._apart:
            lanes = [self._lane(index) for index in range(self.options.jobs)]
            draw_in_lanes([lane for lane in lanes if isinstance(lane, LaneProcess)], declared, request)
        return declared

    def _start_first(self, request: Request) -> None:
        """Let the first worker import its backend. Meanwhile this process queries the driver for its device, which
        takes a second or two if there are several GPUs.
        """
        first = next(iter(request.candidates), None)
        if first is None or first in self._described or self.options.in_process:
            return
        with contextlib.suppress(WorkerStartError):  # it is asked for again, which says what is in the way
            self._lane(0).start(first, request.device)

    def _start_others(self, candidate: Candidate, device: str) -> None:
        for index in range(1, self.options.jobs):
            try:
                self._lane(index).start(candidate, device)
            except WorkerStartError:
                break  # the run will ask for one again, and say what is in the way

    def declared(self, candidate: Candidate, device: str, meanwhile: Callable[[], None] = _nothing) -> Capabilities:
        """Return what a backend declares. Raises ``UsageError`` if it cannot be imported. ``meanwhile``: as in
        ``LaneProcess.describe``.
        """
        if candidate not in self._described:
            try:
                self._described[candidate] = self._lane(0).describe(candidate, device, meanwhile)
            except WorkerStartError:
                # A process of the kit was killed; it has another one now.
                self._described[candidate] = self._lane(0).describe(candidate, device, meanwhile)
            except UsageError as error:
                if not self._sharing or not self._sharing.daemon or not OF_DRIVER.search(str(error)):
                    raise
                self._end_lanes()
                self._lanes.clear()
                self._sharing = without_daemon(self._sharing, str(error), self.options.mps)
                return self.declared(candidate, device, meanwhile)
        return self._described[candidate].declared

    def capabilities_lines(self, specs: Sequence[str], device: str) -> list[tuple[str, str]]:
        """Pairs for each backend: one line with what it declares, and the reason why it cannot be imported. One of the
        two is empty."""
        found = []
        resolve(device).prepare_process()
        for spec in specs:
            try:
                found.append((capabilities_line(self.declared(Candidate(spec), device)), ""))
            except UsageError as error:
                found.append(("", str(error)))
        return found

    def device_name(self, device: str) -> str:
        """Return the name of a device."""
        return resolve(device).name

    def run(self, plan: Plan, items: Sequence[Item], *, ahead: bool = True) -> Generator[CaseResult, None, None]:
        """Results as they come, one for each item. Closing the generator ends what is running.

        ``ahead``: whether the next case-run begins while the previous one is evaluated, or while the caller uses its
        result. A case-run that was interrupted by the end of one of the kit's processes runs once more.
        """
        groups = groups_of(items)
        count = 1 if self.options.in_process else max(1, min(self.options.jobs, len(groups)))
        waiting = Waiting(groups, count, early=plan.order == "listed")
        for index in [index for index in self._lanes if index >= count]:
            # It may keep a worker of another backend, and that memory of the device.
            self._lanes.pop(index).close()
        self._share(plan.device if plan.header.device == "cuda" else "cpu")
        plan = plan.to_run()
        coming = {index: waiting.of_lane() for index in range(count)}
        busy: dict[Lane | LaneProcess, int] = {}
        running: dict[int, Item] = {}
        done: deque[CaseResult] = deque()
        try:
            while not self._closed and (coming or busy or done):
                if done and not ahead:
                    yield done.popleft()
                    continue
                for index in sorted(set(coming) - set(busy.values())):
                    for item, after in coming[index]:
                        if self._budget_is_over():
                            assert self.options.budget_s is not None
                            done.append(not_started(item, self.options.budget_s))
                            continue
                        lane = self._lane(index)
                        self.begun(item)
                        lane.begin(plan, Work(item, after if ahead else None, self._afresh))
                        busy[lane], running[index] = index, item
                        break
                    else:
                        del coming[index]
                while done and ahead:
                    yield done.popleft()
                for lane in _ready(list(busy)):
                    if (found := lane.result()) is None:
                        continue
                    index = busy.pop(lane)
                    result, afresh = found
                    item = running[index]
                    if isinstance(result, Lost):
                        again = once_more(item, result.how)
                        if isinstance(again, Item):
                            coming[index] = itertools.chain([(again, None)], coming[index])
                            continue
                        result = again
                    self._afresh.note(result, afresh)
                    done.append(replace(result, repeated=item.lost) if item.lost else result)
        finally:
            for lane, index in busy.items():
                lane.close()
                self._lanes.pop(index, None)

    def close(self) -> None:
        """End every lane, with its worker."""
        self._closed = True
        self._end_lanes()
        if self._sharing is not None:
            self._sharing.close()

    def _end_lanes(self) -> None:
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.end()
        for lane in lanes:
            lane.close()

    def _lane(self, index: int) -> Lane | LaneProcess:
        if index not in self._lanes:
            gpus = self.options.gpus
            gpu = (self._sharing or Sharing()).gpu(gpus[index % len(gpus)] if gpus else "")
            self._lanes[index] = (LaneProcess if self._apart else Lane)(self.options, gpu)
            self._lanes[index].note = lambda text: self.note(text)
        lane = self._lanes[index]
        if self._closed:  # while it was made
            lane.close()
        return lane

    def _budget_is_over(self) -> bool:
        return self.options.budget_s is not None and time.monotonic() - self._begun >= self.options.budget_s


def _ready(busy: Sequence[Lane | LaneProcess]) -> Sequence[Lane | LaneProcess]:
    """Return the lanes whose result can be asked for; of lanes in this process, any one."""
    apart = [lane for lane in busy if isinstance(lane, LaneProcess)]
    return ready(apart) if apart else busy
