"""``results compare``: show what changed between two results files."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...registry import UsageError
from ...reports.record import read_report
from ...reports.shards import read_merged


@click.command(
    short_help="Show what changed between two results files.",
    epilog="""\b
Examples:
  attn-testkit results compare yesterday.json today.json
  attn-testkit results compare nights/ today.json
  attn-testkit results compare nights/ shard-*.json
  attn-testkit results compare yesterday.json today.json --json
\b
Exit code 1: something newly fails or vanished, NEW did not finish, or NEW has another problem that OLD has not.
Without an OLD it is that of NEW's verdict.""",
)
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path(), nargs=-1, required=True)
@click.option("--good", is_flag=True, help="Of a folder, take the newest run with exit code 0.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(old: str, new: tuple[str, ...], good: bool, as_json: bool) -> int:
    """Show what changed between two results files: newly failing, newly passing, vanished, margins that shrank.

    OLD may be a folder of results files. Then NEW is compared with the newest finished run before it, of the same tier
    and the same kind of device, real or emulated. NEW may be all shards of a run.
    """
    from ...reports.compare import compare_reports, comparison_text, ending_of
    from ...reports.history import last_night
    from ...reports.page import verdict_of

    before = None if Path(old).is_dir() else read_report(old)
    after = read_merged(new)
    before = before or last_night(old, after, good=good)
    if before is None:
        click.echo(f"nothing to compare with: {old} has no finished run of this tier and device before NEW", err=True)
        click.echo(verdict_of(after), err=True)
        return ending_of(after)
    if before == after:
        raise UsageError(
            f"{old} and {' '.join(new)} are the same run; nothing can have changed. Name the earlier run first"
        )
    ours, theirs = list(before.header.backends), list(after.header.backends)
    if not {*ours} & {*theirs}:
        raise UsageError(
            f"{old} is of {', '.join(ours)}, and {' '.join(new)} of {', '.join(theirs)}: these are different backends, "
            "which have no case-run in common; compare two runs of one backend"
        )
    found = compare_reports(before, after)
    click.echo(json.dumps(found.as_plain(), indent=1) if as_json else comparison_text(found))
    return found.exit_code
