"""``results known``: print entries of known failures for what failed in a run."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from ...registry import UsageError
from ...reports.record import write_report
from ...reports.shards import read_merged
from ...running.planning.known_from import crashes_of, entries_from


@click.command(
    short_help="Print entries of known failures for what failed.",
    epilog="""\b
Examples:
  attn-testkit results known red.json --issue https://example.org/12 --until 2027-03-31 > known_failures.toml
  attn-testkit results known shard-*.json --issue https://example.org/12 --until 2027-03-31
  attn-testkit results known red.json --quarantine crash.json --issue https://example.org/12 --until 2027-03-31
\b
`attn-testkit known FILE` checks the file.""",
)
@click.argument("files", type=click.Path(), nargs=-1, required=True)
@click.option("--issue", required=True, metavar="URL", help="Where the failures are followed up.")
@click.option("--until", required=True, metavar="DATE", help="The last day, as 2027-03-31; a year ahead at most.")
@click.option(
    "--quarantine", type=click.Path(), metavar="FILE",
    help="Quarantine what crashed or timed out, and write those results to FILE, which shows the crash.",
)  # fmt: skip
def known(files: tuple[str, ...], issue: str, until: str, quarantine: str | None) -> int:
    """Print entries for a file of known failures, which `run --known-failures` reads, from results files.

    The files are all shards of a run, or one whole run. An entry covers case-runs that failed in these files, and none
    that passed.
    """
    try:
        last = datetime.date.fromisoformat(until)
    except ValueError:
        raise UsageError(f"--until is {until!r}; expected a date such as 2027-03-31") from None
    if last < datetime.datetime.now(datetime.UTC).date():
        raise UsageError(f"--until is {until}, which has passed; expected a day to come")
    report = read_merged(files)
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
        click.echo(
            f"only shard {only} was read: an entry may cover a case-run that passed in another shard; give all shards",
            err=True,
        )
    click.echo(f"entries: {entries.count}", err=True)
    return 0
