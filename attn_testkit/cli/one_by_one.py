"""Case-runs that are requested one by one, each after the result of the previous one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..results.case_result import CaseResult
from ..running.planning.candidate import Candidate
from ..running.planning.request import Explains, Item, Options, Plan, Request, kit_error
from ..running.processes.judge_process import JudgeError, JudgeProcess

if TYPE_CHECKING:
    from ..cases.case import Case


class OneByOne:
    """The processes that judge one backend, each replaced if it dies. One process runs cases under no_grad and another
    those under inference_mode: a worker cannot switch back from one to the other, and unordered cases would start a new
    worker every time.
    """

    def __init__(self, request: Request, timeout_s: float) -> None:
        """Plan ``request``, which names one backend. The plan holds the header and what each case-run needs."""
        self._request = request
        self._timeout_s = timeout_s
        self._processes: dict[bool, JudgeProcess] = {}
        (candidate,) = request.candidates
        try:
            self.plan: Plan = self._process(False).plan(request)
            self.declared = self._process(False).capabilities(candidate, request.device)
        except BaseException:
            self.close()
            raise
        self._candidate: Candidate = candidate

    def run(self, case: Case, execution: str, *, explains: Explains = "check") -> CaseResult:
        """The result of one case-run, whatever the backend does.

        ``explains``: extent of the diagnosis of a failure. Finding the cause of a failure takes as long as many
        case-runs.
        """
        item = Item(self._candidate.spec, case.mode.value, execution, case.id)
        plan = replace(self.plan.to_run(), explains=explains)
        try:
            (result,) = self._process(case.inference_mode).run(plan, [item])
        except JudgeError as error:
            self._processes.pop(case.inference_mode).close()
            return kit_error(item, str(error))
        return result

    def close(self) -> None:
        """End the processes; the next case-run has a new one."""
        while self._processes:
            self._processes.popitem()[1].close()

    def _process(self, inference_mode: bool) -> JudgeProcess:
        if inference_mode not in self._processes:
            options = Options(timeout_s=self._timeout_s, asks_afresh=False, diagnose="all")
            self._processes[inference_mode] = JudgeProcess(options, self._request.device)
        return self._processes[inference_mode]
