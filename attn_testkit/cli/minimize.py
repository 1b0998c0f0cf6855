"""``minimize``: find which settings of a failing case its failure needs."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from ..registry import UsageError
from ..results.case_result import BAD, CaseResult, Status, failed_check
from ..results.failure_text import format_failure
from ..results.run_header import RunHeader
from ..running.planning.request import Item, Request
from ..running.processes.judge_process import JudgeError
from .one_by_one import OneByOne
from .options import command_line, one_backend, run_option, seconds_option
from .run import terminated_like_interrupted
from .show import LOG_SECONDS, echo_header

if TYPE_CHECKING:
    from ..cases.case import Case
    from ..minimize.search import Search


@click.command(
    short_help="Reduce a failing case to the settings that its failure needs.",
    epilog="""\b
Examples:
  attn-testkit minimize --backend my_pkg.attn:MyBackend CASE
  attn-testkit minimize --backend my_pkg.attn:MyBackend --execution graph --seconds 120 CASE
\b
Exit code 1: it fails, and was minimized. 0: it passes. 2: interrupted. 5: it does not run here.""",
)
@one_backend
@click.argument("case")
@run_option("executions")
@run_option("device")
@click.option("--any-failure", is_flag=True, help="Accept a failure of a different check than CASE's.")
@seconds_option(600.0, "Start no case-run after S seconds.")
@run_option("timeout_s")
def minimize(
    backend: str,
    case: str,
    executions: tuple[str, ...],
    device: str,
    any_failure: bool,
    seconds: float,
    timeout_s: float,
) -> int:
    """Make a failing case as simple as possible while it fails the same check.

    Each setting that differs from the minimal case of the mode is reset, or moved toward the minimal value, as long as
    the case fails. The failure needs the settings that are left. Without --execution, the case is tried in eager mode
    first and, if that passes, under a graph.
    """
    from ..cases.declared import not_declared

    parsed = _parsed(case)
    request = Request((backend,), executions=executions, device=device, cases=(case,), command=command_line())
    with terminated_like_interrupted(), contextlib.closing(OneByOne(request, timeout_s)) as judge:
        echo_header(judge.plan.header)
        lacking = not_declared(judge.declared, parsed)
        if lacking:
            raise UsageError(f"{parsed.id} needs what the backend does not declare: {lacking}")
        if not judge.plan.items:
            for row in judge.plan.preset:
                click.echo(format_failure(row, judge.plan.header))
            click.echo("attn-testkit: nothing ran", err=True)
            return 5
        return _minimize(parsed, judge, _Limits(seconds, any_failure))


@dataclass(frozen=True)
class _Limits:
    seconds: float
    any_failure: bool


def _parsed(case_id: str) -> Case:
    from ..cases.case import parse_case

    try:
        return parse_case(case_id)
    except ValueError as error:
        raise UsageError(f"{error}; minimize takes one case id, no wildcards") from None


def _minimize(case: Case, judge: OneByOne, limits: _Limits) -> int:
    passed = []
    for item in judge.plan.items:
        search = _search_for(item, judge, limits)
        first = search.begin(case)
        if first.status in BAD:
            return _go_on(search, judge, item)
        click.echo(f"{case.id} ({item.execution}): {first.status}")
        passed.append(first.status is Status.PASSED)
    click.echo("NOTHING TO MINIMIZE: it does not fail")
    return 0 if all(passed) else 5


def _search_for(item: Item, judge: OneByOne, limits: _Limits) -> Search:
    from ..minimize.search import Search

    def run(case: Case) -> CaseResult:
        # The cause is looked for only in the first and the smallest case: it takes longer than a case-run.
        result = judge.run(case, item.execution, explains="check" if search.runs else "cause")
        if result.of_the_kit:
            raise JudgeError(result.reason)
        return result

    search = Search(judge.declared, run, limits.seconds, limits.any_failure, on_result=_Progress().see)
    return search


@dataclass
class _Progress:
    """Progress lines on stderr."""

    _begun: float = field(default_factory=time.monotonic)
    _last: float = 0.0

    def see(self, result: CaseResult, search: Search) -> None:
        now = time.monotonic() - self._begun
        if search.smallest and now - self._last >= LOG_SECONDS:
            self._last = now
            click.echo(f"  {search.runs} case-runs, {now:.0f} s; so far {search.smallest.case}", err=True)


def _go_on(search: Search, judge: OneByOne, item: Item) -> int:
    """Minimize, retry the result in a fresh process, print it, and return the exit code."""
    from ..minimize.search import TimeUp

    assert search.first is not None
    click.echo(f"  fails {failed_check(search.first)} ({item.execution}); minimizing:", err=True)
    ended = "MINIMIZED"
    try:
        try:
            search.go_on()
        except TimeUp:
            ended = "TIME IS UP"
        # A backend that keeps something between case-runs may fail because of what ran before.
        judge.close()
        fresh = judge.run(search.case, item.execution, explains="cause")
        if fresh.status not in BAD:
            click.echo(f"  {search.case.id} passes in a fresh process: it fails only after other case-runs", err=True)
            search.forget()
            ended = "NOT MINIMIZED"
        elif search.smallest and failed_check(fresh) == failed_check(search.smallest):
            search.smallest = fresh
    except KeyboardInterrupt:
        ended = "INTERRUPTED"
    _print(search, judge.plan.header, ended)
    return 2 if ended == "INTERRUPTED" else 1


def _print(search: Search, header: RunHeader, ended: str) -> None:
    """Print the failure of the smallest case, its non-default settings, and one line on how the search ended."""
    from ..cases.case import parse_case
    from ..minimize.search import needs

    assert search.first is not None
    assert search.smallest is not None
    click.echo(format_failure(search.smallest, header))
    if search.minimal is None:
        click.echo(f"{ended}: only the case itself was run")
        return
    odd = needs(search.case, search.minimal)
    click.echo(f"  needs    {'; '.join(map(str, odd)) or 'nothing: the minimal case fails'}")
    if search.needs_steps_before:
        click.echo(f"  before   {search.needs_steps_before} of {search.first.case} passes as the first step")
    click.echo(f"  minimal  {search.minimal.id} {'passes' if search.plain_passes else 'fails too'}")
    before = len(needs(parse_case(search.first.case), search.minimal))
    words = f"{ended}: from {before} non-default settings to {len(odd)}, in {search.runs} case-runs"
    click.secho(f"\n{words}", bold=True, fg="red")
