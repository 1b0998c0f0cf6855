"""The outcome of a run: the verdict that every front end ends with, the texts before it, and both for Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from ..results import (
    BAD,
    CaseResult,
    RunHeader,
    Status,
    format_failure,
    left_lines,
    not_covered_lines,
    not_declared_lines,
)
from .verdict import Verdict, conclude, verdict

__all__ = ["FailureTexts", "NotConformant", "Results", "verdict"]


class FailureTexts:
    """The texts of failures as they are printed: the first few of a kind in full, the rest as one line each."""

    def __init__(self, header: RunHeader, *, verbose: bool = False) -> None:
        self._header, self._verbose = header, verbose
        self._shown: Counter[tuple[str, str, str, str]] = Counter()

    def of(self, result: CaseResult) -> tuple[str, str]:
        """The first line, which is complete in itself, and the rest of the text."""
        check = result.findings[0].check if result.findings else result.status.value
        kind = (result.backend, result.mode, result.execution, check)
        self._shown[kind] += 1
        first, _, rest = format_failure(result, self._header).partition("\n")
        if self._verbose or self._shown[kind] <= IN_FULL:
            return first, f"\n{rest}\n"
        return first, f" [{check}; {result.backend} {result.execution}]"


IN_FULL = 3
"""Number of failures of one backend, mode, execution and check that are printed in full."""
MOST_PRINTED = 60
"""Number of failures that ``Results`` prints; it counts the rest."""


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
        """True if the run took only a part of what the tier plans, so that it says nothing about the rest."""
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
        lines = ["".join(texts.of(failure)) for failure in self.failures[:MOST_PRINTED]]
        if len(self.failures) > MOST_PRINTED:
            lines.append(f"and {len(self.failures) - MOST_PRINTED} more that did not pass")
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
                    *not_covered_lines(self.header.not_covered),
                    *not_declared_lines(self.header.not_declared),
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
