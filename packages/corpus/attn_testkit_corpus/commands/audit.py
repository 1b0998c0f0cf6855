"""``audit``: test the kit itself on seeded bugs, known-good backends and adversarial backends."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from attn_testkit.cli.options import run_option
from attn_testkit.reports.record import refuse_unwritable, write_text

from .audit_mutants import hunt_mutants, mutant_options

if TYPE_CHECKING:
    from ..audit import Settings

LOG_SECONDS = 15.0


@click.command(
    short_help="Test the kit itself on its catalogue of broken backends.",
    epilog="""\b
Examples:
  attn-testkit audit --device cpu --html audit.html
  attn-testkit audit --fault 'qlens-*' --verbose
  attn-testkit audit --device cuda --class ABCJK
  attn-testkit audit --mutants my_pkg.attn:MyBackend --sample 100 --journal mutants.jsonl
\b
Exit code 1: a bug or a mutant survives, a known-good backend fails, an adversarial one
passes, or a check catches nothing that others do not.""",
)
@run_option("tier", default="core")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="GLOB",
    help="Only backends with such a name; repeatable.",
)
@click.option("--class", "classes", default="", metavar="LETTERS", help="Only seeded bugs of these classes, as ABCJK.")
@click.option(
    "--field-bugs",
    type=click.Path(exists=True, file_okay=False),
    metavar="FOLDER",
    help="Only the field bugs in FOLDER.",
)
@run_option("device")
@run_option("seed")
@run_option("jobs", default=None, show_default=False, help="Processes; default: as many as fit.")
@run_option("timeout_s", default=240.0, help="Time limit of one bug.")
@click.option(
    "--last",
    type=click.Path(),
    metavar="FILE",
    help="First what caught a bug in this --json.",
)
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Write results as JSON.")
@click.option("--html", "html_file", type=click.Path(), metavar="FILE", help="Write the kill matrix as a page.")
@click.option("--verbose", "-v", is_flag=True, help="Print the failure of every seeded bug.")
@click.option("--list", "show_list", is_flag=True, help="List all broken and known-good backends.")
@mutant_options
def audit(
    faults: tuple[str, ...],
    classes: str,
    field_bugs: str | None,
    tier: str,
    device: str,
    seed: int,
    jobs: int | None,
    timeout_s: float,
    last: str | None,
    json_file: str | None,
    html_file: str | None,
    verbose: bool,
    show_list: bool,
    **hunting: Any,
) -> int:
    """Test the kit itself: broken and adversarial backends must fail, known-good ones must pass.

    With --mutants: change a backend in one place at a time, and report the changes that no case notices.
    """
    refuse_unwritable(json_file, html_file)
    shared = {"tier": tier, "device": device, "seed": seed, "jobs": jobs or min(2, os.cpu_count() or 1)}
    code = hunt_mutants(hunting, shared, json_file)
    if code is not None:
        return code
    from attn_testkit.environment import resolve

    from ..audit import Settings
    from ..audit import audit as run_audit
    from ..audit.show import audit_page, audit_text, list_text
    from ..audit.verdicts import caught_before

    if show_list:
        click.echo(list_text())
        return 0
    emulated = resolve(device).emulated
    jobs = jobs or min(8 if emulated else 4, os.cpu_count() or 1, _processes_that_fit())
    known = caught_before(last) if last else {}
    settings = Settings(tier, device, seed, faults, classes, field_bugs or "", jobs, timeout_s, known)
    with _Progress(settings) as progress:
        found = run_audit(settings, progress.see)
    click.echo(audit_text(found, verbose=verbose))
    if json_file:
        write_text(json_file, json.dumps(found.as_plain(), indent=1))
    if html_file:
        write_text(html_file, audit_page(found))
    return found.exit_code


def _processes_that_fit() -> int:
    """Number of processes that fit into memory: a process needs up to 2.5 GB."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8
    return max(1, memory // (3 << 30))


def _bad_in_a_word(verdict: Any) -> tuple[bool, str]:
    if hasattr(verdict, "proves"):
        return not verdict.proves, "an adversarial backend passes" if verdict.green else "fails without its cheat"
    return (not verdict.caught, "survived") if hasattr(verdict, "caught") else (bool(verdict.alarms), "false alarm")


class _Progress:
    """Progress: a bar on a terminal, a line every few seconds in a log."""

    def __init__(self, settings: Settings) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._last = self._started = time.monotonic()
        self._bad = 0
        click.echo(
            f"attn-testkit audit: tier {settings.tier}, seed {settings.seed}, {settings.jobs} processes", err=True
        )

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def see(self, verdict: Any, done: int, total: int) -> None:
        """Count one more verdict; print its name if it is bad."""
        bad, word = _bad_in_a_word(verdict)
        self._bad += bad
        name = getattr(verdict, "slug", getattr(verdict, "name", ""))
        if bad:
            click.echo(f"  {name}: {word}", err=True)
        if self._bar:
            if self._task is None:
                self._task = self._bar.add_task("", total=total)
            self._bar.update(self._task, completed=done, description=f"{name[:40]:<40}")
        elif time.monotonic() - self._last > LOG_SECONDS:
            self._last = time.monotonic()
            click.echo(f"  {done} of {total}, {self._bad} bad, {self._last - self._started:.0f} s", err=True)
