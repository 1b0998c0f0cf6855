"""``known``: check a file of known failures without running a case, or write one from the results of a run."""

from __future__ import annotations

import contextlib
import datetime
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from ..registry import UsageError
from ..reports.record import write_report
from ..reports.shards import read_merged
from ..running.planning.known_failures import load_known
from ..running.planning.known_from import crashes_of, entries_from
from ..running.planning.request import Request, prepare
from ..running.processes.judge_process import JudgeProcess
from .options import run_option


@click.command(
    short_help="Check a file of known failures, or write one.",
    epilog="""\b
Examples:
  attn-testkit known known_failures.toml
  attn-testkit known known_failures.toml --backend my_pkg.attn:MyBackend
  attn-testkit known --from red.json --issue https://example.org/issues/12 --until 2027-03-31 > known_failures.toml
  attn-testkit known --issue https://example.org/issues/12 --until 2027-03-31 --from shard-*.json
  attn-testkit known --from red.json --quarantine crash.json --issue https://example.org/issues/12 --until 2027-03-31

\b
An entry:
  [[known]]
  cases = "decode-*-w*"                    # glob on case ids, or a list
  kind  = "tolerated"                      # or "quarantine": never launched
  check = "matches-oracle"                 # the check that may fail, or a list
  issue = "https://example.org/issues/12"
  until = 2027-03-31                       # after this day the run fails; a year ahead at most
  # optional: backend = "my_pkg*", execution = "graph", when = "sm90 and my-pkg<0.4"
  # of a quarantine: record = "crash.json", in which the case crashed""",
)
@click.argument("files", type=click.Path(), nargs=-1)
@run_option("backends")
@click.option(
    "--from", "sources", type=click.Path(), multiple=True, metavar="FILE",
    help="Print entries for the failures in results.",
)  # fmt: skip
@click.option("--issue", metavar="URL", help="With --from: the address where the failures are followed up.")
@click.option("--until", metavar="DATE", help="With --from: the last day, as 2027-03-31; a year ahead at most.")
@click.option(
    "--quarantine", type=click.Path(), metavar="FILE",
    help="With --from: quarantine what crashed or timed out, and write those results to FILE, which shows the crash.",
)  # fmt: skip
def known(
    files: tuple[str, ...],
    backends: tuple[str, ...],
    sources: tuple[str, ...],
    issue: str | None,
    until: str | None,
    quarantine: str | None,
) -> int:
    """Check the form and the dates of files of known failures; with --backend, that every entry matches a case.

    With --from, print the entries for results files instead, the shards of a run or one whole run: each covers what
    failed there, and nothing that passed.
    """
    if sources:
        if backends:
            raise UsageError("--from prints entries and checks none; leave out --backend")
        # A shell makes several arguments of --from shard-*.json, and the option takes the first.
        return _print_entries((*sources, *files), issue, until, quarantine)
    if not files:
        raise UsageError("name a file of known failures, or --from a results file with --issue and --until")
    if issue or until or quarantine:
        raise UsageError("--issue, --until and --quarantine belong to --from, which names a results file")
    return max(_check(file, backends) for file in files)


def _check(file: str, backends: tuple[str, ...]) -> int:
    entries = load_known(file)
    today = datetime.datetime.now(datetime.UTC).date()
    globs = Counter(entry.number for entry in entries)
    first = {entry.number: entry for entry in reversed(entries)}
    for number, entry in sorted(first.items()):
        left = (entry.until - today).days
        when = f"{left:5} days left" if left >= 0 else f"expired {-left} days ago"
        more = f" and {globs[number] - 1} more" if globs[number] > 1 else ""
        click.echo(f"{number:3}  {entry.kind:<10}  {when}  {entry.cases}{more}  {entry.issue}")
    problems = [f"{entry.name} expired on {entry.until}" for _, entry in sorted(first.items()) if entry.expired(today)]
    if backends:
        with contextlib.closing(JudgeProcess()) as judge:
            problems = prepare(judge, Request(backends, tier="full", known_failures=file)).problems()
    for problem in problems:
        click.echo(f"problem: {problem}")
    click.echo(f"entries: {len(first)}, problems: {len(problems)}", err=True)
    return 1 if problems else 0


def _print_entries(sources: Sequence[str], issue: str | None, until: str | None, quarantine: str | None) -> int:
    if not issue or not until:
        raise UsageError("--from needs --issue URL, where the failures are followed up, and --until DATE")
    try:
        last = datetime.date.fromisoformat(until)
    except ValueError:
        raise UsageError(f"--until is {until!r}; expected a date such as 2027-03-31") from None
    if last < datetime.datetime.now(datetime.UTC).date():
        raise UsageError(f"--until is {until}, which has passed; expected a day to come")
    report = read_merged(sources)
    crashes = crashes_of(report) if quarantine else None
    entries = entries_from(report.results, issue, last, record=Path(quarantine).name if quarantine else "")
    if quarantine and crashes:
        if failure := write_report(quarantine, crashes):
            raise UsageError(f"{failure}; make room, and try again")
        click.echo(
            f"wrote {quarantine}: {len(crashes.results)} case-runs that crashed or timed out; keep it by the entries",
            err=True,
        )
    click.echo(entries.text, nl=False)
    for remark in entries.remarks:
        click.echo(f"left out: {remark}", err=True)
    if not report.finished:
        click.echo("the run did not finish: what it did not run has no entry", err=True)
    if report.header.selection.shard:
        only = report.header.selection.shard
        click.echo(f"only shard {only} was read: an entry may cover what passed in another; give all shards", err=True)
    click.echo(f"entries: {entries.count}", err=True)
    return 0
