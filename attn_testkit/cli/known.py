"""``known``: check a file of known failures without running a case."""

from __future__ import annotations

import contextlib
import datetime
from collections import Counter

import click

from ..registry import UsageError
from ..running.planning.known_failures import load_known
from ..running.planning.request import Request, prepare
from ..running.processes.judge_process import JudgeProcess
from .options import run_option


@click.command(
    short_help="Check a file of known failures.",
    epilog="""\b
Examples:
  attn-testkit known known_failures.toml
  attn-testkit known known_failures.toml --backend my_pkg.attn:MyBackend

\b
The file:
  version = 1
  [[known]]
  cases = "decode-*-w*"                    # glob on case ids, or a list
  kind  = "tolerated"                      # or "quarantine": never launched; "flaky": two weeks at most
  check = "matches-oracle"                 # the check that may fail, or a list
  issue = "https://example.org/issues/12"
  until = 2027-03-31                       # after this day the run fails; a year ahead at most
  # optional: backend = "my_pkg*", execution = "graph", when = "sm90 and my-pkg<0.4"
  # of a quarantine: record = "crash.json", in which the case crashed

\b
`attn-testkit results known` writes entries for what failed in a run.""",
)
@click.argument("files", type=click.Path(), nargs=-1, required=True)
@run_option("backends")
def known(files: tuple[str, ...], backends: tuple[str, ...]) -> int:
    """Check the form and the dates of files of known failures, and run no case; with --backend, check that every entry
    matches a case.
    """
    if results := next((file for file in files if file.endswith(".json")), ""):
        raise UsageError(f"known reads files of known failures; `attn-testkit results known {results}` writes one")
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
