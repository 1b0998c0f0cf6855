"""``list``, ``explain`` and ``known``: looking without running."""

from __future__ import annotations

import dataclasses
import datetime
import json
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from ..registry import UsageError, did_you_mean, known_backends
from ..reports.record import plain
from ..running.known_failures import load_known
from ..running.request import Prepared, Request, prepare
from .options import backend_option, request_from, selection_options
from .show import out

__all__ = ["explain", "known", "list_"]


@click.command(
    "list",
    short_help="Show the registered backends, or the cases a run would take.",
    epilog="""\b
Examples:
  attn-testkit list
  attn-testkit list --cases --backend triton --mode target-verify --tier core
  attn-testkit list --json""",
)
@click.option("--cases", "show_cases", is_flag=True, help="The case ids that a run with these options would take.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@selection_options
def list_(show_cases: bool, as_json: bool, **values: Any) -> int:
    """Show the registered backends and what they claim; with --cases the ids of the cases that a run would take.

    A backend that is not registered needs no listing: name it module:Class.
    """
    request = request_from(values)
    if show_cases:
        return _list_cases(request, as_json)
    if request.backends:
        raise UsageError("list shows every registered backend; did you mean list --cases --backend SPEC?")
    backends = known_backends()
    if as_json:
        click.echo(json.dumps([{**plain(dataclasses.asdict(b)), "origin": str(b.origin)} for b in backends], indent=1))
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("backend", "from", "claims"):
        table.add_column(name, overflow="fold")
    for backend in backends:
        claims = Text(backend.capabilities) if not backend.failure else Text(backend.failure, style="red")
        table.add_row(Text(backend.name), Text(f"{backend.origin}\n{backend.spec}"), claims)
    out().print(table)
    return 0


def _list_cases(request: Request, as_json: bool) -> int:
    items = request.plan().items
    if as_json:
        rows = [
            {"backend": i.backend, "mode": i.mode.value, "execution": i.execution.value, "case": i.case.id}
            for i in items
        ]
        click.echo(json.dumps(rows, indent=1))
    else:
        for case in dict.fromkeys(item.case.id for item in items):
            click.echo(case)
    return 0 if items else 5


@click.command(
    short_help="Say what a promise or a case is.",
    epilog="""\b
Examples:
  attn-testkit explain
  attn-testkit explain replay-follows-batch
  attn-testkit explain decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod""",
)
@click.argument("what", required=False, metavar="[PROMISE|CASE]")
def explain(what: str | None) -> int:
    """Say what a promise means and what usually breaks it, or what a case id stands for and what it chose.

    Without an argument: every promise in one line.
    """
    from ..checks import PROMISES

    if what is None:
        width = max(map(len, PROMISES))
        for promise in PROMISES.values():
            click.echo(f"{click.style(promise.id.ljust(width), bold=True)}  {promise.promise}")
        return 0
    if what in PROMISES:
        promise = PROMISES[what]
        click.secho(promise.id, bold=True)
        for name, text in (("promise", promise.promise), ("cause", promise.cause), ("source", promise.source)):
            click.echo(f"  {name:<8} {text}")
        return 0
    return _explain_case(what, tuple(PROMISES))


def _explain_case(what: str, promises: tuple[str, ...]) -> int:
    from ..cases.case import parse_case
    from .explain_case import explain_case

    hint = did_you_mean(what, promises)
    try:
        case = parse_case(what)
    except ValueError as error:
        raise UsageError(f"no promise {what!r}{hint}" if hint else str(error)) from error
    explain_case(case)
    return 0


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
  check = "matches-oracle"                 # the promise that may break, or a list
  issue = "https://example.org/issues/12"
  until = 2027-03-31                       # after this day the run fails
  # optional: backend = "my_pkg*", execution = "graph", when = "sm90 and my-pkg<0.4\"""",
)
@click.argument("file", type=click.Path())
@backend_option
def known(file: str, backends: tuple[str, ...]) -> int:
    """Check a file of known failures: its form, its dates, and with --backend that every entry matches a case."""
    entries = load_known(file)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    for entry in entries:
        left = (entry.until - today).days
        click.echo(f"{entry.number:3}  {entry.kind:<10}  {left:5} days left  {entry.cases}  {entry.issue}")
    problems = [f"{entry.name} expired on {entry.until}" for entry in entries if entry.expired(today)]
    if backends:
        prepared: Prepared = prepare(Request(backends, tier="full"), file)
        problems = prepared.problems()
    for problem in problems:
        click.echo(f"problem: {problem}")
    click.echo(f"{len(entries)} entries, {len(problems)} problems", err=True)
    return 1 if problems else 0
