"""The options of ``run`` for several machines: a shard of the case-runs, and a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..registry import UsageError
from ..reports.record import read_report
from ..reports.shards import requested_shard
from ..results.run_header import RunHeader
from ..running.planning.request import Plan
from ..running.planning.shards import durations_of, shard_of

F = TypeVar("F", bound=Callable[..., Any])


def shard_options(command: F) -> F:
    """Add the options that select a shard."""
    options = [
        click.option(
            "--shard", metavar="K/N", help="Only part K of N, for `results merge`."
        ),
        click.option(
            "--durations-from", type=click.Path(), multiple=True, metavar="FILE", hidden=True,
            help="Balance shards by these results.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def sharded(plan: Plan, values: dict[str, Any]) -> Plan:
    """Return the plan of the requested shard, or the whole plan if none is requested. Raises ``UsageError``."""
    shard = requested_shard(values["shard"], os.environ)
    files = values["durations_from"]
    if shard is None:
        if files:
            raise UsageError("--durations-from balances shards; give it with --shard, or with --ray")
        return plan
    return shard_of(plan, shard, durations_of(map(read_report, files)) if files else None)


def refuse_other_shard(name: str, then: RunHeader, now: RunHeader) -> None:
    """Raise ``UsageError`` if the results file of another shard is continued, or that of a whole run by a shard."""
    before, here = then.selection.shard or "of everything", now.selection.shard or "of everything"
    if before != here:
        raise UsageError(f"{name} is from another run: it is shard {before}, here it is {here}")
    if here != "of everything" and then.plan != now.plan:
        raise UsageError(f"{name} is from another run: its plan is {then.plan!r}, here {now.plan!r}")
