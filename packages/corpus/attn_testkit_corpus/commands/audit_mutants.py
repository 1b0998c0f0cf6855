"""``audit --mutants``: find lines of a backend that could be wrong without any case failing."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from attn_testkit.cli.options import F, Value, run_option
from attn_testkit.registry import UsageError
from attn_testkit.reports.record import write_text
from attn_testkit.running.planning.run_option import MINUTES

_LOG_SECONDS = 15.0
_OWN = {
    "modules": "--mutate", "modes": "--mode", "sample": "--sample", "most": "--most", "minutes": "--minutes",
    "journal": "--journal", "equivalents": "--equivalent",
}  # fmt: skip
"""Options that need --mutants."""


def mutant_options(command: F) -> F:
    """Add the options of mutation testing to a command."""
    options = [
        click.option("--mutants", metavar="BACKEND", help="Mutation-test this backend instead."),
        click.option("--mutate", "modules", multiple=True, metavar="MODULE", help="Mutate this one too; repeatable."),
        run_option("modes"),
        click.option("--sample", type=click.IntRange(1), metavar="N", help="Only N random mutants."),
        click.option("--most", type=click.IntRange(0), metavar="N", help="At most N core case-runs per mutant."),
        click.option("--minutes", type=Value(MINUTES), help="Start no mutant after M minutes."),
        click.option("--journal", type=click.Path(), metavar="FILE", help="Keep verdicts here, and resume."),
        click.option("--equivalent", "equivalents", type=click.Path(), metavar="FILE", help="Mutants to ignore."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


_OTHERS = {
    "faults": "--fault", "classes": "--class", "timeout_s": "--timeout", "last": "--last", "html_file": "--html",
    "verbose": "--verbose", "show_list": "--list",
}  # fmt: skip
"""Options that --mutants excludes."""


def hunt_mutants(values: dict[str, Any], shared: dict[str, Any], json_file: str | None) -> int | None:
    """Run the mutants of a backend; return the exit code, or None if no backend was named.

    Args:
        values: values of the options of ``mutant_options``.
        shared: values of options that mutation tests and audits share.
        json_file: the results file, or None.

    """
    backend = values.pop("mutants")
    if backend is None:
        if alone := [option for name, option in _OWN.items() if values[name] not in (None, ())]:
            raise UsageError(f"{', '.join(alone)} needs --mutants BACKEND, the backend to change")
        return None
    source = click.get_current_context().get_parameter_source
    if others := [option for name, option in _OTHERS.items() if source(name) is ParameterSource.COMMANDLINE]:
        raise UsageError(
            f"{', '.join(others)} cannot be used with --mutants: it is for the catalogue of broken backends"
        )
    if shared["tier"] == "full":
        raise UsageError("--tier full cannot be used with --mutants; take --tier smoke or core")
    from ..mutants import Settings, hunt
    from ..mutants.report import exit_code, hunt_text, plain

    for name in ("journal", "equivalents"):
        values[name] = Path(values[name]) if values[name] else None
    progress = _Progress()
    found = hunt(Settings(backend, **values, **shared), progress.see)
    click.echo(hunt_text(found))
    if json_file:
        write_text(json_file, json.dumps(plain(found), indent=1))
    return exit_code(found)


class _Progress:
    """Progress: a line every few seconds; on a terminal, one that is overwritten."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()

    def see(self, what: str, done: int, total: int) -> None:
        """Count one more case-run of the unchanged backend, or one more mutant."""
        now = time.monotonic()
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K  {done} of {total}  {what[:90]}", err=True, nl=done == total)
        elif now - self._last > _LOG_SECONDS or done == total:
            self._last = now
            click.echo(f"  {done} of {total}, {now - self._begun:.0f} s: {what[:100]}", err=True)
