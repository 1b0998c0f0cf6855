"""The state of one pytest session: the plan, the expected case-runs, the results, and the exit status."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ..registry import UsageError
from ..reports.annotations import annotation_lines
from ..reports.outcome import failure_lines
from ..reports.record import Record, result_from_plain
from ..reports.shards import Shard
from ..reports.tally import text_table
from ..reports.verdict import conclude, narrowed, next_lines, not_tried_lines
from ..results.case_result import BAD, RAN, CaseResult, remarks_of
from ..results.failure_text import format_failure
from ..results.remarks import (
    excluded_lines,
    launch_lines,
    left_lines,
    not_declared_lines,
    note_lines,
    printed_lines,
    repeated_lines,
)
from ..results.run_header import CUT, RunHeader
from ..running.planning.request import (
    Item,
    Judge,
    Options,
    Plan,
    Prepared,
    Request,
    final_code,
    kit_error,
    not_started,
    param_id,
    prepare,
)
from ..running.planning.shards import shard_of
from ..running.processes.judge_process import JudgeError, JudgeProcess


class _NoJudge:
    """A judge for sessions whose plan exists already; it must not be called."""

    def plan(self, request: Request) -> Plan:
        raise UsageError("only the controller plans")

    def run(self, plan: Plan, items: Sequence[Item]) -> Generator[CaseResult, None, None]:
        raise UsageError("only a judge runs")

    def close(self) -> None:
        pass


def pickled_plan(data: bytes | None) -> Plan | None:
    """Unpickle the plan that the controller of an xdist run sent to this worker."""
    plan: Plan | None = pickle.loads(data) if data else None
    return plan


@dataclass(eq=False)
class Session:
    """The state of the plugin. Workers use only the plan; results are collected where the terminal is."""

    request: Request
    options: Options = field(default_factory=Options)
    report: Path | None = None
    min_cases: int = 0
    command: str = ""
    refusal: str = ""
    """The reason why the request cannot be planned."""
    begun: float = field(default_factory=lambda: time.monotonic())
    shard: Shard | None = None
    """The part of the case-runs that this session runs; None for all."""
    planned: Plan | None = None
    """The controller's plan, on a worker of xdist."""
    judge_place: str = ""
    """Address of the judge that the controller's judge has forked, on a worker of xdist."""
    prepared: Prepared | None = None
    header: RunHeader | None = None
    due: dict[str, Item] = field(default_factory=dict)
    """Node id -> case-run, for every test of the suite that was selected."""
    results: list[CaseResult] = field(default_factory=list)
    show_not_covered: bool = False
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False
    collects_only: bool = False
    named: bool = False
    """The command line names a backend or a results file of the suite."""
    selected_by: str = ""
    """The arguments of pytest that select tests, as written; empty if there are none."""
    code: int = 0
    _record: Record | None = None
    _not_recorded: str = ""
    _judge: Judge | None = None

    def plan(self) -> Prepared | None:
        """The plan, made on first use; None if ``refusal`` says why there is no plan."""
        if self.prepared is None and not self.refusal:
            try:
                if not self.request.backends:
                    raise UsageError(
                        "no backend is named; give --attn-backend=module:Class, or a name from `attn-testkit list`"
                    )
                if self.planned is None:
                    request = replace(self.request, command=self.command)
                    plan = self.judge().plan(request)
                    plan = shard_of(plan, self.shard) if self.shard else plan
                    self.prepared = prepare(self.judge(), request, plan)
                else:
                    # The judge is started for the first case-run, not for collection.
                    self.prepared = prepare(_NoJudge(), self.request, self.planned)
            except UsageError as error:
                self.refusal = f"attn-testkit: {error}"
        return self.prepared

    def judge(self) -> Judge:
        """The judge's process, started on first use."""
        if self._judge is None:
            # The budget is one of the session, in which other tests run between case-runs.
            options = replace(self.options, budget_s=None)
            self._judge = JudgeProcess(options, self.request.device, place=self.judge_place)
        return self._judge

    def judge_for_worker(self) -> str:
        """The address of a judge for a new xdist worker; empty if the worker has to start its own."""
        try:
            return self._judge.for_worker() if isinstance(self._judge, JudgeProcess) else ""
        except JudgeError:
            self._drop_judge()
            return ""

    def run(self, item: Item) -> CaseResult:
        """The result of one case-run, whatever the backend does."""
        prepared = self.plan()
        assert prepared is not None
        budget_s = self.options.budget_s
        if budget_s is not None and time.monotonic() - self.begun >= budget_s:
            return not_started(item, budget_s)
        try:
            (result,) = self.judge().run(prepared.plan.to_run(), [item])
        except JudgeError as error:
            self._drop_judge()
            return kit_error(item, str(error))
        except BaseException:
            # Interrupted in the middle, as by a timeout of pytest: the next case-run needs another process.
            self._drop_judge()
            raise
        return prepared.ledger.judge(result)

    def sort(self, items: list[pytest.Item]) -> None:
        """Put the tests of the suite into the plan's order, in the places that they occupy among other tests."""
        if self.prepared is None:
            return
        planned = {self._id(item): number for number, item in enumerate(self.prepared.items)}
        number = {item.nodeid: planned.get(item.nodeid.partition("[")[2][:-1]) for item in items}
        places = [place for place, item in enumerate(items) if number[item.nodeid] is not None]
        own = sorted((items[place] for place in places), key=lambda item: number[item.nodeid] or 0)
        for place, item in zip(places, own, strict=True):
            items[place] = item

    def begin(self, nodeids: Iterable[str]) -> None:
        """Note the selected tests after collection. The session fails if one of them does not run."""
        prepared = self.plan()
        if prepared is None or self.header is not None:
            return
        by_id = {self._id(item): item for item in prepared.items}
        for nodeid in nodeids:
            # Once: a decorated test of another file may have the same id, which xdist hands over too.
            item = by_id.pop(nodeid.partition("[")[2][:-1], None)
            if item is not None:
                self.due[nodeid] = item
        deselected = len(prepared.items) - len(self.due)
        header = prepared.plan.header
        not_covered = dict(header.not_covered)
        if deselected:
            # The values that those cover are not known here, without torch.
            not_covered = {
                spec: (*phrases, f"what {deselected} deselected case-runs cover")
                for spec, phrases in not_covered.items()
            }
        by = self.selected_by or f"a hook or plugin of pytest, which removed {deselected} tests"
        header = narrowed(
            header,
            header.planned - deselected,
            by,
            asked=bool(self.selected_by),
        )
        self.header = replace(header, command=self.command, not_covered=not_covered)
        self.problems = prepared.problems()
        if self.report:
            try:
                self._record = Record(self.report, self.header)
            except UsageError as error:
                raise pytest.UsageError(f"attn-testkit: {error}") from error
        for result in prepared.preset:
            self._keep(result)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the result of a report, from this process or a worker."""
        data: dict[str, Any] | None = getattr(report, "attn_result", None)
        if data is not None:
            self._keep(result_from_plain(data))

    def finish(self, exitstatus: int) -> int:
        """Return the session's exit status: pytest's own, unless an expected case-run did not run."""
        if self.prepared is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not self.collects_only:
            # Workers of xdist that collect nothing report nothing.
            self.begin([])
        if self.header is None:
            # The session may be green, and the user who typed the option reads that as the backend's verdict.
            asked_for_nothing = self.named and not self.collects_only and exitstatus == pytest.ExitCode.OK
            self.refusal = self.refusal or (_NO_SUITE if asked_for_nothing else "")
            return int(pytest.ExitCode.USAGE_ERROR) if asked_for_nothing else exitstatus
        self.interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        ran = sum(result.status in RAN for result in self.results if result.case)
        if self.shard:
            # All shards together have one floor.
            ran = self.header.planned_in_all
        if ran < self.min_cases:
            what = "planned for all shards" if self.shard else "ran"
            self.problems.append(f"{ran} case-runs {what}, fewer than attn-min-cases = {self.min_cases}")
        self.code = final_code(self.header, self.results, self.problems, self.interrupted)
        if self._record:
            self._record.finish(self.code, interrupted=self.interrupted, problems=self.problems)
            self._not_recorded = self._record.failure
            self._record = None
            if self._not_recorded and self.code in (0, CUT):
                # Readers of the file, in this job or the next, would not see the findings of this session.
                self.code = 3
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return self.code
        return 3 if exitstatus == pytest.ExitCode.TESTS_FAILED and self.code == 3 else exitstatus

    def summarize(self, terminal: pytest.TerminalReporter) -> None:
        """Write the table and the verdict at the end of pytest's output."""
        if self.header is None and self.refusal == _NO_SUITE:
            terminal.line(_NO_SUITE, red=True)
        if self.header is None or terminal.config.option.collectonly:
            return
        terminal.section("attention conformance")
        for line in [*text_table(self.results), *failure_lines(self.header, self.results)]:
            terminal.line(line)
        for hint in remarks_of(self.results):
            terminal.line(f"hint: {hint}")
        for result in self.prepared.preset if self.prepared else ():
            if result.status in BAD:
                terminal.line(format_failure(result, self.header))
        missing = self._missing()
        for item in missing[:_MISSING_LISTED]:
            terminal.line(f"did not run: {item}")
        if len(missing) > _MISSING_LISTED:
            terminal.line(f"did not run: {len(missing) - _MISSING_LISTED} more")
        if self.prepared:
            for warning in self.prepared.ledger.warnings():
                terminal.line(f"warning: {warning}")
        for problem in self.problems:
            terminal.line(f"problem: {problem}")
        for line in note_lines(self.header.notes):
            terminal.line(line)
        for line in [*repeated_lines(self.results), *printed_lines(self.results)]:
            terminal.line(line)
        how = "" if self.show_not_covered else "--attn-show-not-covered lists them"
        concluded = conclude(self.header, self.results, problems=self.problems, interrupted=self.interrupted)
        for line in [*left_lines(self.header, self.results), *not_tried_lines(self.header, concluded, how)]:
            terminal.line(line)
        for line in excluded_lines(self.header.excluded) if self.show_not_covered else ():
            terminal.line(line)
        for line in not_declared_lines(self.header.not_declared):
            terminal.line(line)
        for line in launch_lines(self.header, self.results):
            terminal.line(line)
        for line in annotation_lines(self.header, self.results, os.environ):
            terminal.line(line)
        for line in next_lines(self.header, concluded, "--attn-tier core"):
            terminal.line(line)
        terminal.line(str(concluded), bold=True, green=self.code == 0, red=self.code != 0)
        if self.report:
            terminal.line(f"report: {self.report}")
        if self._not_recorded:
            terminal.line(f"the results file is incomplete: {self._not_recorded}", red=True)

    def verdict(self) -> str:
        """The verdict in one line; empty if no test of the suite was collected."""
        if self.header is None:
            return ""
        return str(conclude(self.header, self.results, problems=self.problems, interrupted=self.interrupted))

    def close(self) -> None:
        """End the judge. If the session broke off, leave the results file as it is, readable and unfinished."""
        if self._record:
            self._record.close()
        self._drop_judge()

    def _id(self, item: Item) -> str:
        return param_id(item, self.request.candidates)

    def _drop_judge(self) -> None:
        if self._judge is not None:
            self._judge.close()
            self._judge = None

    def _missing(self) -> list[str]:
        seen = {result.key for result in self.results}
        keys = {item.key: self._id(item) for item in self.due.values()}
        return [name for key, name in keys.items() if key not in seen]

    def _keep(self, result: CaseResult) -> None:
        self.results.append(result)
        if self._record:
            self._record.add(result)


_MISSING_LISTED = 3
"""Number of case-runs without a result that the end of a session names; the others are counted."""
_NO_SUITE = (
    "attn-testkit: --attn-backend or --attn-report was given, and no test of the suite was collected, so that nothing "
    "was tested; add --pyargs attn_testkit.suite"
)


SESSION: pytest.StashKey[Session] = pytest.StashKey()
