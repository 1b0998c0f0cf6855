"""``known``: check a file of known failures without running a case."""

from __future__ import annotations

import contextlib
import datetime

import click

from ..running.planning.known_failures import load_known
from ..running.planning.request import Request, prepare
from ..running.processes.judge_process import JudgeProcess
from .options import backend_option

__all__ = ["known"]


@click.command(
    short_help="Check a file of known failures.",
    epilog="""\b
Examples:
  attn-testkit known known_failures.toml
  attn-testkit known known_failures.toml --backend my_pkg.attn:MyBackend

\b
An entry:
  [[known]]
  cases = "decode-*-w*"                    # glob on case ids
  kind  = "tolerated"                      # or "quarantine": never launched
  check = "matches-oracle"                 # the check that may fail, or a list
  issue = "https://example.org/issues/12"
  until = 2027-03-31                       # after this day the run fails; a year ahead at most
  # optional: backend = "my_pkg*", execution = "graph", when = "sm90 and my-pkg<0.4"
  # of a quarantine: record = "crash.json", in which the case crashed""",
)
@click.argument("file", type=click.Path())
@backend_option
def known(file: str, backends: tuple[str, ...]) -> int:
    """Check the form and the dates of a file of known failures; with --backend, that every entry matches a case."""
    entries = load_known(file)
    today = datetime.datetime.now(datetime.UTC).date()
    for entry in entries:
        left = (entry.until - today).days
        when = f"{left:5} days left" if left >= 0 else f"expired {-left} days ago"
        click.echo(f"{entry.number:3}  {entry.kind:<10}  {when}  {entry.cases}  {entry.issue}")
    problems = [f"{entry.name} expired on {entry.until}" for entry in entries if entry.expired(today)]
    if backends:
        with contextlib.closing(JudgeProcess()) as judge:
            problems = prepare(judge, Request(backends, tier="full"), file).problems()
    for problem in problems:
        click.echo(f"problem: {problem}")
    click.echo(f"entries: {len(entries)}, problems: {len(problems)}", err=True)
    return 1 if problems else 0
