"""Options of ``run`` with their meaning in pytest: which case-runs run, and what is printed about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click

from ..reports.tally import seconds_of
from ..reports.verdict import narrowed
from ..results.case_result import RAN, CaseResult, Status
from ..running.planning.request import Item, Prepared, param_id
from .keyword import keyword
from .last_failed import failed_before, place

F = TypeVar("F", bound=Callable[..., Any])


def pytest_options(command: F) -> F:
    """Add the options."""
    options = [
        click.option(
            "-k", "keyword_text", metavar="EXPR", default="",
            help="Only matching names: 'graph and not fp8'.",
        ),
        click.option(
            "--lf", "--last-failed", "last_failed", is_flag=True,
            help="Only what failed when it last ran.",
        ),
        click.option("--collect-only", "--co", "collect_only", is_flag=True, help="List the case-runs, run none."),
        click.option(
            "--junit", "--junitxml", "junit_file", type=click.Path(), metavar="FILE", help="Write JUnit XML."
        ),
        click.option(
            "--durations", type=click.IntRange(0), metavar="N", hidden=True, help="List the N slowest; 0 lists all."
        ),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def choose(prepared: Prepared, keyword_text: str, last_failed: bool) -> Prepared:
    """Leave out what ``-k`` and ``--lf`` deselect. Raises ``UsageError`` if the text is not an expression."""
    if keyword_text:
        matches, backends = keyword(keyword_text), prepared.request.candidates
        prepared = only(prepared, lambda row: matches(param_id(row, backends)), f"-k {keyword_text!r}")
    if not last_failed:
        return prepared
    failed = failed_before()
    count = sum(_key(item) in failed for item in prepared.items)
    if not count:
        why = f"none of the {len(failed)} case-runs that failed is selected" if failed else "nothing failed"
        click.echo(f"  --lf: {why} according to {place()}; running all that is selected", err=True)
        return prepared
    click.echo(f"  --lf: {count} case-runs that failed, from {place()}", err=True)
    return only(prepared, lambda row: _key(row) in failed, "--lf")


def only(prepared: Prepared, keep: Callable[[Item | CaseResult], bool], by: str) -> Prepared:
    """Keep some of the case-runs; ``by`` is the selection in words."""
    items = tuple(filter(keep, prepared.items))
    preset = tuple(row for row in prepared.preset if not row.case or keep(row))
    dropped = [row for row in prepared.preset if row.status in RAN | {Status.QUARANTINED} and row not in preset]
    left = len(prepared.items) - len(items) + len(dropped)
    header = prepared.plan.header
    if left:
        phrase = f"what {left} deselected case-runs cover"
        not_covered = {spec: (*phrases, phrase) for spec, phrases in header.not_covered.items()}
        header = replace(narrowed(header, header.planned - left, by), not_covered=not_covered)
    return replace(prepared, items=items, preset=preset, plan=replace(prepared.plan, header=header))


def _key(row: Item | CaseResult) -> tuple[str, str, str]:
    return row.backend, row.execution, row.case


def echo_items(prepared: Prepared) -> int:
    """List what would run, one name per line as ``-k`` sees it. Returns the exit code: 0, or 5 for nothing."""
    for item in prepared.items:
        click.echo(param_id(item, prepared.request.candidates))
    click.echo(f"{len(prepared.items)} case-runs would run, but none did", err=True)
    return 0 if prepared.items else 5


def echo_durations(prepared: Prepared, results: Sequence[CaseResult], most: int) -> None:
    """List the slowest case-runs."""
    ran = sorted((result for result in results if result.status in RAN and result.case), key=lambda r: -seconds_of(r))
    shown = ran[: most or None]
    click.echo(f"slowest {len(shown)} of {len(ran)} case-runs:")
    for result in shown:
        click.echo(f"  {seconds_of(result):8.2f} s  {param_id(result, prepared.request.candidates)}")
