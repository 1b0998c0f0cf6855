"""``report`` and ``compare``: what to do with a record."""

from __future__ import annotations

import json

import click

from ..registry import UsageError
from ..reports.record import read_report
from .running import write_text

__all__ = ["compare", "report"]


@click.command(
    short_help="Turn a record into a page or a summary.",
    epilog="""\b
Examples:
  attn-testkit report out.json --html out.html
  attn-testkit report out.json --markdown >> "$GITHUB_STEP_SUMMARY\"""",
)
@click.argument("file", type=click.Path())
@click.option("--html", "html_file", type=click.Path(), metavar="OUT", help="Write a page that needs nothing else.")
@click.option("--markdown", is_flag=True, help="Print a summary for a CI job.")
def report(file: str, html_file: str | None, markdown: bool) -> int:
    """Turn the record of a run (run --json, or pytest --attn-report) into a page or a summary."""
    from ..reports.render import html_page, markdown_summary

    if not html_file and not markdown:
        raise UsageError("what should the report be? Give --html OUT or --markdown")
    loaded = read_report(file)
    if html_file:
        write_text(html_file, html_page(loaded))
    if markdown:
        click.echo(markdown_summary(loaded))
    return 0


@click.command(
    short_help="Say what changed between two records.",
    epilog="""\b
Examples:
  attn-testkit compare yesterday.json today.json
  attn-testkit compare yesterday.json today.json --json
\b
Exit code 1 when something newly fails or vanished.""",
)
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def compare(old: str, new: str, as_json: bool) -> int:
    """Say what changed between two records: newly failing, newly passing, vanished, margins that shrank."""
    from ..reports.compare import compare_reports, comparison_text

    found = compare_reports(read_report(old), read_report(new))
    click.echo(json.dumps(found.as_plain(), indent=1) if as_json else comparison_text(found))
    return found.exit_code
