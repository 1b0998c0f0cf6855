"""The outcome of a run: the verdict with which every front end ends, the texts before it, and both as Python
objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from ..results.case_result import BAD, CaseResult, Status
from ..results.failure_text import format_failure, repro_command
from ..results.remarks import launch_lines, left_lines, not_declared_lines
from ..results.rules import rule_of
from ..results.run_header import RunHeader
from ..results.texts import telling_first
from .grouping import Causes, Group, group_failures
from .in_common import in_common
from .record import Report
from .verdict import Verdict, conclude, next_lines, not_tried_lines
from .verdict import verdict as verdict


class FailureTexts:
    """The texts of failures as they are printed: the first of each cause, or with ``verbose`` all."""

    def __init__(self, header: RunHeader, *, verbose: bool = False) -> None:
        self._header, self._verbose = header, verbose
        self._causes = Causes()

    def of(self, result: CaseResult) -> tuple[str, str] | None:
        """The first line, which is complete in itself, and the rest of the text; None if an earlier failure has the
        same cause."""
        new = self._causes.add(result)
        if not new and not self._verbose:
            return None
        first, _, rest = format_failure(result, self._header, brief=not self._verbose).partition("\n")
        return first, f"\n{rest}\n"


def failure_lines(header: RunHeader | None, results: Sequence[CaseResult], more: str = "") -> list[str]:
    """The failures of a run by cause: number, cause, what the failing cases share, and the command to start with.

    ``more``: the options that show more than the first failure of each cause.
    """
    bad = [result for result in results if result.case and result.status in BAD]
    # The cause of the failure that was printed first comes first: that is the simplest case. Then the largest.
    groups = sorted(group_failures(bad), key=lambda group: bad[0] not in group.results)
    if not groups:
        return []
    several = len({result.backend for result in results}) > 1
    causes = f"{len(groups)} cause" + ("s" if len(groups) != 1 else "")
    rest = f" ({more})" if more and len(bad) > len(groups) else ""
    lines = [f"did not pass: {len(bad)} case-run{'s' if len(bad) != 1 else ''}, {causes}{rest}"]
    for group in groups[:MOST_CAUSES]:
        name = f"; {group.backend}" if several else ""
        lines.append(f"  {len(group.results)}  {group.cause} [{group.check}{name}]")
        if shared := in_common(group.results, results):
            lines.append(f"     in common: {shared}")
    if len(groups) > MOST_CAUSES:
        lines.append(f"  and {len(groups) - MOST_CAUSES} more causes")
    return [*lines, f"start here: {repro_command(bad[0], header)}"]


def outcome_of(report: Report) -> dict[str, Any]:
    """The outcome of a run for a program, as ``run --json -`` prints it: the verdict, and the first failure of each
    cause with what to do next.
    """
    bad = [result for result in report.results if result.case and result.status in BAD]
    found = conclude(report.header, report.results, problems=report.problems, interrupted=report.interrupted)
    return {
        "verdict": str(found),
        "word": found.word,
        "exit_code": report.exit_code,
        "counts": dict(Counter(result.status.value for result in report.results if result.case)),
        "problems": list(report.problems),
        "causes": [_for_a_program(group, report) for group in group_failures(bad)],
    }


def _for_a_program(group: Group, report: Report) -> dict[str, Any]:
    first = group.results[0]
    finding = first.findings[0] if first.findings else None
    return {
        "cause": group.cause,
        "check": group.check,
        "rule": rule_of(group.check),
        "case_runs": len(group.results),
        "case": first.case,
        "execution": first.execution,
        "headline": finding.headline if finding else first.reason,
        "where": finding.where if finding else "",
        "hint": telling_first(finding.hint) if finding else "",
        "in_common": in_common(group.results, report.results),
        "repro": repro_command(first, report.header),
    }


MOST_CAUSES = 10
"""Number of causes that a summary names; the rest are counted."""


@dataclass(frozen=True, repr=False)
class Results(Sequence[CaseResult]):
    """The result of ``check_backend``: a sequence of ``CaseResult`` that is true only if the backend conforms.

    Printing it shows the failures and the verdict in one line.
    """

    header: RunHeader
    rows: tuple[CaseResult, ...] = ()
    """Every case-run, and a row per mode and execution that is not declared or cannot run here (``case`` is "")."""
    problems: tuple[str, ...] = ()
    """Reasons besides its case-runs why the run fails, such as a known failure that expired."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command line: 0 conformant, or a selection that was asked for passed; 1 not, 3 the kit
        itself failed, 5 nothing to run."""
        return self._concluded.code

    @property
    def ok(self) -> bool:
        """True if the backend conforms: something passed, every planned case-run ran, and nothing failed. Of a
        selection, only if the caller asked for it; see ``partial``.
        """
        return self.exit_code == 0

    @property
    def partial(self) -> bool:
        """True if the run covers only a part of what the tier plans, so it proves nothing about the rest."""
        return bool(self.header.selection)

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """Case-runs that failed, crashed, timed out, or passed although a known failure expects otherwise."""
        return tuple(row for row in self.rows if row.status in BAD)

    @property
    def verdict(self) -> str:
        """The line that the command line ends with."""
        return str(self._concluded)

    @property
    def _concluded(self) -> Verdict:
        return conclude(self.header, self.rows, problems=self.problems)

    def __bool__(self) -> bool:
        return self.ok

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> CaseResult: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[CaseResult, ...]: ...
    def __getitem__(self, index: int | slice) -> CaseResult | tuple[CaseResult, ...]:
        return self.rows[index]

    @property
    def texts(self) -> str:
        """The failures as the command line prints them, and what did not run; empty if there are neither."""
        texts = FailureTexts(self.header)
        found = [text for failure in self.failures if (text := texts.of(failure))]
        lines = ["".join(text) for text in found[:MOST_CAUSES]]
        lines += failure_lines(self.header, self.rows)
        lines += [f"not run: {format_failure(row)}" for row in self.rows if row.status is Status.NOT_RUN_HERE]
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join(
            filter(
                None,
                (
                    self.texts,
                    *left_lines(self.header, self.rows),
                    *not_tried_lines(self.header, self._concluded, "header.not_covered lists them"),
                    *not_declared_lines(self.header.not_declared),
                    *launch_lines(self.header, self.rows),
                    *next_lines(self.header, self._concluded, 'tier="core"'),
                    self.verdict,
                ),
            )
        )

    __repr__ = __str__


class NotConformant(AssertionError):
    """Raised if a backend is not known to conform. The message is the verdict, then the failures."""

    def __init__(self, results: Results) -> None:
        super().__init__(results)
        self.results = results

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.results.verdict, self.results.texts)))


NotConformant.__module__ = "attn_testkit"  # the name that users import and that tracebacks show
