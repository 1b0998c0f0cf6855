"""``submit``, ``verify`` and ``matrix``: the run of a profile as an archive, its referee, and a page of many."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..registry import UsageError
from ..reports.record import cannot_write, write_text
from ..reports.verdict import conclude
from ..submissions.archive import Submission, pack, read_submission
from ..submissions.referee import refusals
from ..submissions.standing import badge


@click.command(
    short_help="Pack the run of a profile for others.",
    epilog="""\b
Examples:
  attn-testkit run --backend my_pkg.attn:MyBackend --profile 2026.12/decode --json decode.json
  attn-testkit submit decode.json --to my-decode.zip --badge badge.json""",
)
@click.argument("results", type=click.Path())
@click.option("--to", type=click.Path(), required=True, metavar="FILE", help="The archive to write, FILE.zip.")
@click.option("--known-failures", "known", type=click.Path(), metavar="FILE", help="The file that the run was given.")
@click.option(
    "--badge", "badge_file", type=click.Path(), metavar="FILE", help="Write the JSON of a badge (shields.io)."
)
def submit(results: str, to: str, known: str | None, badge_file: str | None) -> int:
    """Pack a results file, its environment and its known failures into one archive, after verify has accepted it."""
    if not to.endswith(".zip"):
        raise UsageError(f"--to is {to}, and `matrix` reads only archives named .zip; write --to {to}.zip")
    data = pack(results, known)
    found = read_submission(to, data)
    if reasons := refusals(found):
        _echo_refused(results, reasons)
        return 1
    try:
        Path(to).write_bytes(data)
    except OSError as error:
        raise cannot_write(Path(to), error) from error
    if badge_file:
        write_text(badge_file, json.dumps(badge(found)) + "\n")
    click.echo(_accepted(found))
    return 0


@click.command(
    short_help="Check submissions, offline.",
    epilog="""\b
Examples:
  attn-testkit verify my-decode.zip""",
)
@click.argument("files", type=click.Path(), nargs=-1, required=True)
def verify(files: tuple[str, ...]) -> int:
    """Read submissions, and refuse one that was cut, edited, or run on another device than it names. Nothing is run.

    The verdict of a run may be red: then the submission is a valid record of failures. An archive proves nothing
    against somebody who forges all of it; to be sure, run the profile again.
    """
    code = 0
    for file in files:
        found = read_submission(file)
        if reasons := refusals(found):
            _echo_refused(file, reasons)
            code = 1
        else:
            click.echo(_accepted(found))
    return code


def _accepted(found: Submission) -> str:
    header, report = found.header, found.report
    return f"{found.name}: accepted: {found.backend} on {header.device_name}: " + str(
        conclude(header, report.results, problems=report.problems)
    )


def _echo_refused(name: str, reasons: list[str]) -> None:
    for reason in reasons:
        click.echo(f"{name}: refused: {reason}")


@click.command(
    short_help="Write a page of all submissions in a folder.",
    epilog="""\b
Examples:
  attn-testkit matrix submissions/ --html index.html""",
)
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.option("--html", "html_file", type=click.Path(), required=True, metavar="OUT", help="The page to write.")
def matrix(folder: str, html_file: str) -> int:
    """Write a static page of the submissions in a folder, by device, backend, mode and family.

    Submissions that verify would refuse are left out, and named on the page. Those of other versions of the kit, and of
    earlier days, stay.
    """
    from ..submissions.matrix import matrix_page, read_folder

    found, left_out = read_folder(folder)
    for reason in left_out:
        click.echo(f"left out: {reason}", err=True)
    write_text(html_file, matrix_page(found, left_out))
    click.echo(f"submissions: {len(found)}, left out: {len(left_out)}", err=True)
    return 0
