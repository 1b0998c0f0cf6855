"""``report``: a record as a page or a summary."""

from __future__ import annotations

import click

from ..registry import UsageError
from ..reports.record import read_report
from .files import write_text

__all__ = ["report"]


@click.command(
    short_help="Turn a record into a page or a summary.",
    epilog="""\b
Examples:
  attn-testkit report out.json --html out.html
  attn-testkit report out.json --html out.html --history nights/
  attn-testkit report out.json --markdown >> "$GITHUB_STEP_SUMMARY\"""",
)
@click.argument("file", type=click.Path())
@click.option("--html", "html_file", type=click.Path(), metavar="OUT", help="Write a page that needs nothing else.")
@click.option("--markdown", is_flag=True, help="Print a summary for a CI job.")
@click.option("--previous", type=click.Path(), metavar="RECORD", help="Say what changed since this night.")
@click.option(
    "--history", type=click.Path(), metavar="FOLDER",
    help="Records of earlier nights: trends, and since when each failure is red; the newest that finished is the night "
    "to compare with.",
)  # fmt: skip
def report(file: str, html_file: str | None, markdown: bool, previous: str | None, history: str | None) -> int:
    """Turn the record of a run (run --json, or pytest --attn-report) into a page or a summary.

    Earlier nights count if they are of the same tier, and as real or emulated as this run.
    """
    from ..reports.history import read_history
    from ..reports.render import html_page, markdown_summary

    if not html_file and not markdown:
        raise UsageError("what should the report be? Give --html OUT or --markdown")
    loaded = read_report(file)
    nights = read_history(history, loaded) if history else None
    last = previous or (nights.last if nights else None)
    before = read_report(last) if last else None
    if html_file:
        write_text(html_file, html_page(loaded, before, nights))
    if markdown:
        click.echo(markdown_summary(loaded, before, nights))
    return 0
