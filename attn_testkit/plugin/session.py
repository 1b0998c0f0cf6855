"""What one pytest session knows: the plan, the case-runs that are due, the results, and how it all ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..registry import UsageError
from ..reports.record import Record, result_from_plain
from ..reports.tally import text_table, verdict
from ..results import BAD, RAN, CaseResult, RunHeader, format_failure
from ..running.request import Prepared, Request, final_code, prepare

if TYPE_CHECKING:
    from ..running.plan import WorkItem

__all__ = ["SESSION", "Session", "param_id"]


def param_id(item: WorkItem) -> str:
    """Id of a case-run inside a test's brackets: the same in every worker and from every directory."""
    return f"{item.backend}-{item.execution.value}-{item.case.id}"


@dataclass(eq=False)
class Session:
    """State of the plugin. On workers only the plan is used; results gather where the terminal is."""

    request: Request
    known: Path | None = None
    report: Path | None = None
    min_cases: int = 0
    command: str = ""
    refusal: str = ""
    """Why the request cannot be planned."""
    lost: str = ""
    """Why nothing more can run in this process."""
    prepared: Prepared | None = None
    header: RunHeader | None = None
    due: dict[str, WorkItem] = field(default_factory=dict)
    """Node id -> what it runs, for every test of the suite that was selected."""
    results: list[CaseResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False
    code: int = 0
    _record: Record | None = None

    def plan(self) -> Prepared | None:
        """The plan, made on first use; None when ``refusal`` says why there is none."""
        if self.prepared is None and not self.refusal:
            try:
                if not self.request.backends:
                    raise UsageError("which backend? Give --attn-backend=SPEC (`attn-testkit list` shows the names)")
                self.prepared = prepare(self.request, self.known)
            except UsageError as error:
                self.refusal = f"attn-testkit: {error}"
        return self.prepared

    def begin(self, nodeids: Iterable[str]) -> None:
        """Collection is over: these tests were selected. What of them does not run will fail the session."""
        prepared = self.plan()
        if prepared is None or self.header is not None:
            return
        by_id = {param_id(item): item for item in prepared.plan.items}
        for nodeid in nodeids:
            item = by_id.get(nodeid.partition("[")[2][:-1])
            if item is not None:
                self.due[nodeid] = item
        deselected = len(prepared.plan.items) - len(self.due)
        header = prepared.plan.header
        self.header = replace(header, planned=header.planned - deselected, command=self.command)
        self.problems = prepared.problems()
        if self.report:
            try:
                self._record = Record(self.report, self.header)
            except UsageError as error:
                raise pytest.UsageError(f"attn-testkit: {error}") from error
        for result in prepared.given:
            self._keep(result)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the result that travelled with a report, here or from a worker."""
        data: dict[str, Any] | None = getattr(report, "attn_result", None)
        if data is not None:
            self._keep(result_from_plain(data))

    def finish(self, exitstatus: int) -> int:
        """The session's exit status: pytest's own, unless a case-run that was due did not run."""
        if self.header is None:
            return exitstatus
        self.interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        ran = sum(result.status in RAN for result in self.results if result.case)
        if ran < self.min_cases:
            self.problems.append(f"{ran} case-runs ran, fewer than the {self.min_cases} of attn-min-cases")
        self.code = final_code(self.header, self.results, self.problems, self.interrupted)
        if self._record:
            self._record.finish(self.code, interrupted=self.interrupted, problems=self.problems)
            self._record = None
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return self.code
        return 3 if exitstatus == pytest.ExitCode.TESTS_FAILED and self.code == 3 else exitstatus

    def summarize(self, terminal: pytest.TerminalReporter) -> None:
        """Write the table and the verdict at the end of pytest's output."""
        if self.header is None or terminal.config.option.collectonly:
            return
        terminal.section("attention conformance")
        for line in text_table(self.results):
            terminal.line(line)
        for hint in dict.fromkeys(hint for result in self.results for hint in result.hints):
            terminal.line(f"hint: {hint}")
        for result in self.prepared.given if self.prepared else ():
            if result.status in BAD:
                terminal.line(format_failure(result, self.header))
        for item in self._missing()[:5]:
            terminal.line(f"did not run: {item}")
        if self.prepared:
            for warning in self.prepared.ledger.warnings():
                terminal.line(f"warning: {warning}")
        for problem in self.problems:
            terminal.line(f"problem: {problem}")
        text = verdict(self.header, self.results, problems=self.problems, interrupted=self.interrupted)
        terminal.line(text, bold=True, green=self.code == 0, red=self.code != 0)
        if self.report:
            terminal.line(f"report: {self.report}")

    def close(self) -> None:
        """The session broke: leave the record as it is, readable and unfinished."""
        if self._record:
            self._record.close()

    def _missing(self) -> list[str]:
        seen = {(r.backend, r.execution, r.case) for r in self.results}
        keys = {(i.backend, str(i.execution.value), i.case.id): param_id(i) for i in self.due.values()}
        return [name for key, name in keys.items() if key not in seen]

    def _keep(self, result: CaseResult) -> None:
        self.results.append(result)
        if self._record:
            self._record.add(result)


SESSION: pytest.StashKey[Session] = pytest.StashKey()
