"""The session of a user's own tests as a whole: what failed, by cause, and case-runs that no test reported."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from ..reports.grouping import group_failures
from ..reports.outcome import failure_lines
from ..reports.record import result_from_plain
from ..results.case_result import BAD, RAN, CaseResult
from .own_tests import MARK, OwnTests

MOST_NAMED = 5
"""Number of tests that a message names; the rest are counted."""


class OwnSession:
    """State of the process that owns the terminal. Its hooks also serve the suite, whose results are kept
    separately."""

    def __init__(self, own: OwnTests, *, verbose: bool) -> None:
        self._own, self._verbose = own, verbose
        self._from_workers: list[tuple[str, str]] = []
        self._in_shard = (0, 0)
        self._results: list[CaseResult] = []
        self._outcomes: dict[str, set[str]] = {}
        """Node id of each decorated test -> outcomes of its phases."""
        self._first: dict[tuple[str, str, str], str] = {}
        """Backend, check and cause -> node id of the test whose failure is printed in full."""
        self.problems: list[str] = []

    def take(self, seen: Iterable[Sequence[str]], in_shard: tuple[int, int]) -> None:
        """Store the results of an xdist worker that ends. All workers collect the same tests."""
        self._in_shard = in_shard
        self._from_workers += [(nodeid, status) for nodeid, status in seen]

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a result, and shorten the text of a failure whose cause was printed already; report files are written
        earlier."""
        if MARK in report.keywords:
            self._outcomes.setdefault(report.nodeid, set()).add(report.outcome)
        own: dict[str, Any] | None = getattr(report, "attn_own_result", None)
        data = own or getattr(report, "attn_result", None)
        if data is None:
            return
        result = result_from_plain(data)
        if own:
            self._results.append(result)
        if report.failed and not self._verbose:
            self._shorten(report, result)

    def _shorten(self, report: pytest.TestReport, result: CaseResult) -> None:
        (group,) = group_failures([result])
        first = self._first.setdefault((group.backend, group.check, group.cause), report.nodeid)
        entries: Sequence[Any] = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", ())
        if first != report.nodeid and len(entries) == 1 and entries[0].lines:
            headline, _, _ = entries[0].lines[0].partition("\n")
            short = first.rpartition("::")[2]
            entries[0].lines[:] = [f"{headline}\n  cause    as in {short}; -v prints every failure in full\n"]

    def finish(self, exitstatus: int) -> int:
        """Return the session's exit status: 1 instead of 0 if a case-run failed and its test did not."""
        seen = [*self._own.seen, *self._from_workers]
        red = {nodeid for nodeid, outcomes in self._outcomes.items() if "failed" in outcomes}
        hidden = [nodeid for nodeid, status in seen if status in BAD and nodeid not in red]
        if hidden:
            self.problems.append(
                f"{len(hidden)} case-runs failed and their tests did not (an exception that was caught, an xfail, a "
                f"skip or a hook): {_some(hidden)}; list failures that you accept in a file of known failures"
            )
        started = {nodeid for nodeid, _ in seen}
        skipped = [n for n, outcomes in self._outcomes.items() if "skipped" in outcomes and n not in started]
        some_ran = {_test_of(nodeid) for nodeid, status in seen if status in RAN}
        chosen = [nodeid for nodeid in skipped if _test_of(nodeid) in some_ran]
        if chosen:
            self.problems.append(
                f"{len(chosen)} case-runs were skipped by your tests, and others of the same test ran: "
                f"{_some(chosen)}; deselect them, skip the whole test, or list them in a file of known failures"
            )
        if self.problems and exitstatus == pytest.ExitCode.OK:
            return int(pytest.ExitCode.TESTS_FAILED)
        return exitstatus

    def summarize(self, terminal: pytest.TerminalReporter) -> None:
        """Write the failures by cause, and the problems."""
        causes = failure_lines(None, self._results)
        here, of = max(self._own.in_shard, self._in_shard)
        if causes or self.problems or of:
            terminal.section("attention conformance of your tests")
        if of:
            terminal.line(
                f"SHARD {self._own.shard}: tests of {here} of {of} case-runs of conformance_cases; all shards have to "
                "pass"
            )
        for line in causes:
            terminal.line(line)
        for problem in self.problems:
            terminal.line(f"problem: {problem}", red=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Any:
        """Keep the reasons in the short summary whole if the output is a file or a pipe.

        pytest cuts the lines at 80 columns then, which is less than the id of a test.
        """
        writer, causes = terminalreporter._tw, self._first
        before = writer.fullwidth
        if causes and not terminalreporter.isatty and "COLUMNS" not in os.environ:
            failed = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
            writer.fullwidth = max([before, *(_length_of_line(report) for report in failed)])
        try:
            return (yield)
        finally:
            writer.fullwidth = before


OWN_SESSION: pytest.StashKey[OwnSession] = pytest.StashKey()


def _length_of_line(report: pytest.TestReport) -> int:
    crash = getattr(report.longrepr, "reprcrash", None)
    first, _, _ = str(getattr(crash, "message", "")).partition("\n")
    return len(f"FAILED {report.nodeid} - {first}") + 1


def _test_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _some(nodeids: Sequence[str]) -> str:
    counts = Counter(nodeid.rpartition("::")[2] for nodeid in nodeids)
    shown = [*counts][:MOST_NAMED]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
