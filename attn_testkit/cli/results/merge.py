"""``results merge``: one verdict of all shards of a run."""

from __future__ import annotations

import click

from ...reports.record import read_report, write_report
from ...reports.shards import merge_reports
from ..show import echo_header, print_summary


@click.command(
    short_help="Make one results file and one verdict of all shards.",
    epilog="""\b
Examples:
  attn-testkit results merge shard-*.json
  attn-testkit results merge shard-*.json --json out.json
  attn-testkit results merge shard-*.json --missing --json out.json
\b
Exit code: that of a run of everything; 4 if the files do not belong together.""",
)
@click.argument("files", type=click.Path(), nargs=-1, required=True)
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Write the merged results file.")
@click.option("--missing", is_flag=True, help="Merge what there is; the verdict is INCOMPLETE if a shard is missing.")
def merge(files: tuple[str, ...], json_file: str | None, missing: bool) -> int:
    """Merge the results files of all shards of a run (run --shard K/N --json FILE) into one verdict.

    All shards must have the same version of the kit, tier, seed, backends, device, package versions and plan, and each
    must be given once.
    """
    merged = merge_reports([(name, read_report(name)) for name in files], missing=missing)
    echo_header(merged.header)
    failure = write_report(json_file, merged) if json_file else ""
    code = merged.exit_code or 0
    print_summary(merged.header, merged.results, problems=merged.problems, interrupted=merged.interrupted, code=code)
    if failure:
        click.echo(f"attn-testkit: the results file is incomplete: {failure}", err=True)
    return code
