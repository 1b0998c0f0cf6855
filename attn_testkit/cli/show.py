"""The output of a run on a terminal and in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..reports.annotations import annotation_lines
from ..reports.outcome import FailureTexts, failure_lines
from ..reports.tally import WORDS, cells, text_table
from ..reports.verdict import conclude, next_lines, not_tried_lines
from ..results.case_result import BAD, RAN, CaseResult, remarks_of
from ..results.names import FUZZ
from ..results.remarks import (
    excluded_lines,
    launch_lines,
    left_lines,
    not_declared_lines,
    note_lines,
    printed_lines,
    repeated_lines,
)
from ..results.run_header import RunHeader

LOG_SECONDS = 15.0


def out() -> Console:
    """A console for tables on stdout: wide enough not to wrap if stdout is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, soft_wrap=False)


def echo_header(header: RunHeader) -> None:
    """Print backends, versions and device, before anything runs."""
    backends = ", ".join(f"{spec} {version}".strip() for spec, version in header.backends.items())
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items() if name != "python")
    click.echo(f"attn-testkit {header.kit}: {backends}", err=True)
    planned = f", {header.planned} case-runs" if header.tier != FUZZ else ""  # a search has no fixed number
    click.echo(f"  {header.device_name}; {versions}; tier {header.tier}, seed {header.seed}{planned}", err=True)
    for line in (*filter(None, [header.sharing]), *note_lines(header.notes)):
        click.echo(f"  {line}", err=True)


class Watch:
    """Progress on stderr, failures on stdout as they occur."""

    def __init__(self, total: int, header: RunHeader, *, verbose: bool = False) -> None:
        self._total = total
        self._texts = FailureTexts(header, verbose=verbose)
        self._done = self._bad = 0
        self._started = self._last = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Watch:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def see(self, result: CaseResult) -> None:
        """Count one more result, or a row that was known without running; print it if it is a failure."""
        ran = result.status in RAN
        self._done += ran
        if result.status in BAD:
            self._bad += 1
            self._tell(result)
        now = time.monotonic()
        if self._bar:
            trouble = f", {self._bad} did not pass" if self._bad else ""
            self._bar.update(self._task, advance=int(ran), description=f"{result.mode} {result.execution}{trouble}")
        elif now - self._last > LOG_SECONDS:
            self._last = now
            trouble = f", {self._bad} did not pass" if self._bad else ""
            click.echo(f"  {self._done} of {self._total} case-runs{trouble}, {now - self._started:.0f} s", err=True)

    def note(self, text: str) -> None:
        """Show what goes on between two results, such as a diagnosis."""
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, description=text)
        elif now - self._last > LOG_SECONDS:
            self._last = now
            click.echo(f"  {self._done} of {self._total} case-runs, {now - self._started:.0f} s; {text}", err=True)

    def _tell(self, result: CaseResult) -> None:
        text = self._texts.of(result)
        if text is None:
            return
        first, more = text
        if self._bar:
            self._bar.stop()
        click.echo(click.style(first, fg="red", bold=True) + more)
        if self._bar:
            self._bar.start()


def print_summary(
    header: RunHeader,
    results: Sequence[CaseResult],
    *,
    problems: Sequence[str],
    interrupted: bool,
    code: int,
    verbose: bool = False,
    show_not_covered: bool = False,
) -> None:
    """Print the table, the remarks, and the verdict in one line."""
    if sys.stdout.isatty() and cells(results):
        out().print(_table(results))
    elif results:
        click.echo("\n".join(text_table(results)))
    more = "-v prints all, --diagnose all looks for the cause of each"
    for line in failure_lines(header, results, "" if verbose else more):
        click.echo(line)
    for hint, count in remarks_of(results).most_common(10):
        click.echo(f"hint: {hint}" + (f" ({count} case-runs)" if count > 1 else ""))
    for problem in problems:
        click.echo(f"problem: {problem}")
    for line in [*repeated_lines(results), *printed_lines(results)]:
        click.echo(line)
    how = "" if show_not_covered else "--show-not-covered lists them"
    concluded = conclude(header, results, problems=problems, interrupted=interrupted)
    for line in [*left_lines(header, results), *not_tried_lines(header, concluded, how)]:
        click.echo(line)
    for line in excluded_lines(header.excluded) if show_not_covered else ():
        click.echo(line)
    for line in not_declared_lines(header.not_declared):
        click.echo(line)
    for line in launch_lines(header, results):
        click.echo(line)
    for line in annotation_lines(header, results, os.environ):
        click.echo(line)
    for line in next_lines(header, concluded, "--tier core"):
        click.echo(line)
    click.secho(str(concluded), bold=True, fg="green" if code == 0 else "red")


def _table(results: Sequence[CaseResult]) -> Table:
    heading, *lines = cells(results)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in heading:
        words = name in WORDS
        table.add_column(
            name, justify="left" if words else "right", no_wrap=name in ("mode", "execution"), overflow="fold"
        )
    for line in lines:
        table.add_row(*(Text(cell, style=_style(name, cell)) for name, cell in zip(heading, line, strict=True)))
    return table


def _style(heading: str, cell: str) -> str:
    if heading in BAD:
        return "red"
    return "yellow" if heading == "ran on" and "emulated" in cell else ""
