"""``results``: the commands that read results files."""

from __future__ import annotations

import click

from ..group import Commands
from .compare import compare
from .known import known
from .merge import merge
from .report import report


@click.group(
    cls=Commands,
    short_help="Read results files: report, merge, compare, known failures.",
    epilog="""\b
Examples:
  attn-testkit run --backend my_pkg.attn:MyBackend --json out.json
  attn-testkit results report out.json --html out.html
  attn-testkit results compare yesterday.json out.json""",
)
def results() -> None:
    """Read the results files that run --json, fuzz --json and pytest --attn-report write. No backend runs."""


for _command in (report, merge, compare, known):
    results.add_command(_command)
