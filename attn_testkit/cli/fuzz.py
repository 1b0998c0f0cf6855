"""``fuzz``: run random cases over everything that a backend declares, until the time is up."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..registry import UsageError
from ..reports.record import Record
from ..results.case_result import BAD, CaseResult, Status, failed_check
from ..results.failure_text import format_failure
from ..results.names import FUZZ
from ..results.run_header import RunHeader, exit_code
from ..running.planning.request import EXECUTIONS, Request
from ..running.planning.run_option import MINUTES
from .one_by_one import OneByOne
from .options import Value, command_line, one_backend, run_option
from .run import Interrupts, terminated_like_interrupted
from .show import LOG_SECONDS, echo_header

if TYPE_CHECKING:
    from ..fuzz.database import Database
    from ..fuzz.search import Found, Search


@click.command(
    short_help="Run random cases until the time is up, and minimize failures.",
    epilog="""\b
Examples:
  attn-testkit fuzz --backend my_pkg.attn:MyBackend --minutes 10
  attn-testkit fuzz --backend my_pkg.attn:MyBackend --minutes 5 --mode decode --seed 7 --json fuzz.json
\b
Exit code 0: nothing found; only `run` says whether the backend conforms. 1: found. 2: interrupted. 5: nothing ran.""",
)
@one_backend
@click.option("--minutes", type=Value(MINUTES), default=5.0, show_default=True, help="How long to search.")
@click.option("--runs", type=click.IntRange(1), metavar="N", help="Run at most N case-runs, the same ones each time.")
@run_option("seed")
@run_option("modes")
@run_option("executions")
@run_option("device")
@click.option(
    "--database", type=click.Path(path_type=Path), default=Path(".attn-testkit-fuzz"), show_default=True,
    metavar="FOLDER", help="Folder that remembers failures; they are retried first.",
)  # fmt: skip
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Write results, updated as they come.")
@run_option("timeout_s")
def fuzz(backend: str, minutes: float, database: Path, json_file: str | None, timeout_s: float, **values: Any) -> int:
    """Run random cases over everything that a backend declares, and minimize failures: one case per mode and check,
    with as few non-default values as possible.
    """
    if importlib.util.find_spec("hypothesis") is None:
        raise UsageError("fuzz needs Hypothesis: pip install 'hypothesis>=6.100'")
    from ..fuzz.database import Database

    wanted = _Wanted(backend, minutes, timeout_s, **values)
    request = Request((wanted.backend,), wanted.modes, wanted.executions, device=wanted.device)
    with (
        terminated_like_interrupted() as interrupts,
        contextlib.closing(OneByOne(request, wanted.timeout_s)) as judge,
    ):
        header = replace(
            judge.plan.header, tier=FUZZ, seed=wanted.seed, planned=0, not_covered={}, command=command_line()
        )
        kept = Database(database)
        record = Record(json_file, header) if json_file else None
        echo_header(header)
        return _search(wanted, judge, _Diary(header, kept, record, interrupts))


@dataclass(frozen=True)
class _Wanted:
    backend: str
    minutes: float
    timeout_s: float
    runs: int | None
    seed: int
    modes: tuple[str, ...]
    executions: tuple[str, ...]
    device: str


@dataclass
class _Diary:
    """The output, the results and the kept failures of a search in progress."""

    header: RunHeader
    database: Database
    record: Record | None
    interrupts: Interrupts
    results: list[CaseResult] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _kept: dict[tuple[str, str], Any] = field(default_factory=dict)

    def see(self, result: CaseResult, making_small: Found | None) -> None:
        """Count one more case-run. While a failure is minimized, only its smallest case is recorded, at the end.

        Raises ``KeyboardInterrupt`` if a stop was requested and lost.
        """
        self.interrupts.heed()
        if making_small is None or result.status not in BAD:
            self.add(result)
        now = time.monotonic() - self._begun
        if now - self._last >= LOG_SECONDS:
            self._last = now
            doing = f", making {making_small.smallest.case} smaller" if making_small else ""
            bad = f", {len(self._kept)} found" if self._kept else ""
            click.echo(f"  {len(self.results)} case-runs{bad}, {now:.0f} s{doing}", err=True)

    def add(self, result: CaseResult) -> None:
        """Record a result."""
        self.results.append(result)
        if self.record:
            self.record.add(result)

    def smaller(self, found: Found) -> None:
        """Store a failure that is new or smaller than before at once, so that it is kept however the search ends."""
        from ..fuzz.database import Entry

        if found.kind not in self._kept:
            click.echo(f"found: {found.kind[1]} in {found.first.case} ({found.first.execution}); minimizing:", err=True)
        small = found.smallest
        entry = Entry(small.backend, small.execution, small.case, found.kind[1])
        self.database.replace(self._kept.get(found.kind), entry)
        self._kept[found.kind] = entry

    def end(self, found: Sequence[Found], *, interrupted: bool) -> int:
        """Print the failures and the verdict, close the record, and return the exit code."""
        for each in found:
            if each.smallest is not each.first:
                self.add(each.smallest)
            click.echo(format_failure(each.smallest, self.header))
            click.echo(f"  needs    {', '.join(each.odd) or 'nothing: the minimal case fails'}\n")
        code = exit_code(0, self.results, interrupted)
        if self.record:
            self.record.finish(code, interrupted=interrupted)
        runs = len({(result.execution, result.case) for result in self.results})
        click.secho(_verdict(runs, found, self.results, interrupted), bold=True, fg="green" if code == 0 else "red")
        if found:
            click.echo(f"failures are kept in {self.database.file}; the next search retries them first", err=True)
        return code


def _verdict(runs: int, found: Sequence[Found], results: Sequence[CaseResult], interrupted: bool) -> str:
    ours = sum(result.of_the_kit for result in results)
    if ours:
        return f"the kit itself failed in {ours} of {runs} random case-runs"
    words = f"{len(found)} kind{'s' if len(found) != 1 else ''} of failure" if found else "no failure"
    stopped = ", until the search was interrupted" if interrupted else ""
    hint = "" if found else "; `attn-testkit run` says whether the backend conforms"
    return f"found {words} in {runs} random case-runs{stopped}{hint}"


def _search(wanted: _Wanted, judge: OneByOne, diary: _Diary) -> int:
    from ..contract import Execution, ForwardMode
    from ..fuzz.search import Search, TimeUp

    runnable = {item.mode for item in judge.plan.items}
    if not runnable:
        reasons = dict.fromkeys(row.reason for row in judge.plan.preset if row.reason)
        click.echo(f"NOTHING RAN: {', '.join(reasons)}")
        return 5
    search = Search(
        declared=judge.declared,
        modes=[mode for mode in ForwardMode if mode.value in runnable],
        executions=[Execution(each) for each in wanted.executions or EXECUTIONS],
        run=judge.run,
        explain=partial(judge.run, explains="cause"),
        seed=wanted.seed,
        seconds=60 * wanted.minutes,
        most=wanted.runs,
        on_result=diary.see,
        on_smaller=diary.smaller,
    )
    search.begin()
    interrupted = False
    try:
        with contextlib.suppress(TimeUp):
            _again(search, diary, wanted)
        search.go_on()
    except KeyboardInterrupt:
        interrupted = True
    return diary.end(list(search.found.values()), interrupted=interrupted)


def _again(search: Search, diary: _Diary, wanted: _Wanted) -> None:
    """Retry what failed in earlier searches, and forget what passes now."""
    entries = [
        entry
        for entry in diary.database.of(wanted.backend)
        if entry.execution in (wanted.executions or EXECUTIONS)
        and any(entry.case.startswith(f"{mode.value}-") for mode in search.modes)
    ]
    for entry, result in zip(entries, search.again([(e.execution, e.case) for e in entries]), strict=False):
        if result.status is Status.PASSED:
            click.echo(f"no longer fails: {entry.case} ({entry.execution})", err=True)
            diary.database.replace(entry, None)
        elif failed_check(result) != entry.check:
            diary.database.replace(entry, None)
