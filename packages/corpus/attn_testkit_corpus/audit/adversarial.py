"""Adversarial backends, run as by a front end: a judge in its own process, and an exit code at the end."""

from __future__ import annotations

import time

from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import BAD, CaseResult
from attn_testkit.running.planning.request import Options, Request, final_code
from attn_testkit.running.processes.judge_process import JudgeError, JudgeProcess

from ..faults.adversarial import Adversarial, all_adversarial
from .verdicts import AdversarialVerdict, Settings, Task


class FrontEnd:
    """Runs one backend after another, and gives each the exit code of a command. A judge that died is replaced."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._judge: JudgeProcess | None = None

    def run(self, entry: Adversarial, *, honest: bool) -> tuple[int, str]:
        """Run a backend. Returns the exit code, and the ending in a few words."""
        request = Request(
            (entry.spec(honest=honest),),
            executions=entry.executions,
            device=self._settings.device,
            cases=entry.cases,
            command="attn-testkit audit",
        )
        try:
            if self._judge is None:
                self._judge = JudgeProcess(
                    Options(timeout_s=self._settings.timeout_s, asks_afresh=False), self._settings.device
                )
            plan = self._judge.plan(request)
            results = [*plan.preset, *self._judge.run(plan, plan.items)]
        except JudgeError as error:
            self.close()
            return 3, str(error).splitlines()[0]
        except UsageError as error:
            return 4, str(error).splitlines()[0]
        return final_code(plan.header, results), _ending(results)

    def close(self) -> None:
        """End the judge."""
        if self._judge is not None:
            self._judge.close()
            self._judge = None


def _ending(results: list[CaseResult]) -> str:
    bad = [result for result in results if result.status in BAD]
    if not bad:
        return "passed"
    checks = ", ".join(finding.check for finding in bad[0].findings)
    return f"{bad[0].status}: {checks or bad[0].reason.splitlines()[0]}"


def run_adversarial(task: Task, front_end: FrontEnd) -> AdversarialVerdict:
    """Run one adversarial backend, and the same code without the cheat."""
    entry = next(entry for entry in all_adversarial() if entry.slug == task.name)
    started = time.perf_counter()
    code, ending = front_end.run(entry, honest=False)
    honest_code, honest_ending = front_end.run(entry, honest=True)
    seconds = time.perf_counter() - started
    return AdversarialVerdict(entry.slug, entry.mechanism, code, ending, honest_code, honest_ending, seconds)
