"""``results report``: print the summary of a results file, or write a page."""

from __future__ import annotations

import click

from ...registry import UsageError
from ...reports.record import read_report, write_text
from ...reports.shards import read_runs
from ..show import echo_header, print_summary


@click.command(
    short_help="Print the summary of a run, or write a page or Markdown.",
    epilog="""\b
Examples:
  attn-testkit results report out.json
  attn-testkit results report out.json --html out.html
  attn-testkit results report shard-*.json --html out.html
  attn-testkit results report out.json --html out.html --history nights/
  attn-testkit results report out.json --markdown >> "$GITHUB_STEP_SUMMARY\"""",
)
@click.argument("files", type=click.Path(), nargs=-1, required=True)
@click.option("--html", "html_file", type=click.Path(), metavar="OUT", help="Write an HTML report in one file.")
@click.option("--markdown", is_flag=True, help="Print a summary for a CI job.")
@click.option("--previous", type=click.Path(), metavar="RECORD", help="Show what changed since this results file.")
@click.option(
    "--history", type=click.Path(), metavar="FOLDER",
    help="Results files of earlier nights: show trends, and when each failure began. The newest finished one is the "
    "previous night.",
)  # fmt: skip
def report(
    files: tuple[str, ...], html_file: str | None, markdown: bool, previous: str | None, history: str | None
) -> int:
    """Print what a run printed at its end, or write its results as a page or as Markdown.

    The shards of a run are merged. For several runs, such as those of two architectures, a summary is printed for each.
    Earlier nights count if they have the same tier and ran on the same kind of device, real or emulated.
    """
    from ...reports.history import read_history
    from ...reports.render import html_page, markdown_summary

    runs = read_runs(files)
    if not html_file and not markdown:
        for loaded in runs:
            echo_header(loaded.header)
            print_summary(
                loaded.header,
                loaded.results,
                problems=loaded.problems,
                interrupted=loaded.interrupted,
                code=loaded.exit_code if loaded.exit_code is not None else 1,
            )
        return 0
    if html_file and len(runs) > 1:
        raise UsageError(f"the files are from {len(runs)} runs, but a page shows one: give the files of one run")
    for loaded in runs:
        nights = read_history(history, loaded) if history else None
        last = previous or (nights.last if nights else None)
        before = read_report(last) if last else None
        if html_file:
            write_text(html_file, html_page(loaded, before, nights))
        if markdown:
            click.echo(markdown_summary(loaded, before, nights))
    return 0
