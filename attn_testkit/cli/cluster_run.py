"""``run --ray``: the case-runs of a run as tasks of a Ray cluster, with a verdict for each architecture of its GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..cluster.judge import Architecture, connected
from ..reports.record import read_report
from ..running.planning.request import Options, Prepared, Request, prepare
from ..running.planning.shards import durations_of
from .options import refuse_together

ray_option = click.option(
    "--ray", "ray_address", is_flag=False, flag_value="auto", metavar="[ADDRESS]",
    help="Run on a Ray cluster, or `local`.",
)  # fmt: skip

_NOT_WITH = {
    "in_process": "--in-process",
    "budget_s": "--budget",
    "shard": "--shard",
    "rest_of": "--rest-of",
    "keyword_text": "-k",
    "maps": "--map",
    "since": "--since",
    "changed": "--changed",
    "last_failed": "--lf",
    "collect_only": "--collect-only",
}


def refuse_with_ray(values: dict[str, Any]) -> None:
    """Raise ``UsageError`` for an option that a run on a cluster cannot have."""
    if values["ray_address"]:
        refuse_together("--ray", _NOT_WITH, values)


Follow = Callable[[Prepared, dict[str, Any]], int]
"""Runs what is prepared, prints and records it, and returns the exit code."""


def run_on_cluster(request: Request, options: Options, values: dict[str, Any], follow: Follow) -> int:
    """Run everything once for each architecture of the cluster. Returns the worst exit code."""
    durations = durations_of(map(read_report, values["durations_from"])) if values["durations_from"] else None
    with connected(values["ray_address"], options) as cluster:
        ready = []
        for architecture in cluster.architectures(request.device):
            judge = cluster.judge(architecture)
            judge.durations = durations
            ready.append((architecture, judge, prepare(judge, request)))
        # All shards of all architectures first: Ray runs them while the results of one are followed.
        for architecture, judge, prepared in ready:
            count = judge.begin(prepared.plan, prepared.items) if prepared.items else 0
            click.echo(f"  Ray, {architecture.name}: {count} shards, {architecture.slots} at a time", err=True)
        several = len(ready) > 1
        codes = {}
        with contextlib.ExitStack() as stack:
            for _, judge, _ in ready:
                stack.callback(judge.close)
            for architecture, _, prepared in ready:
                codes[architecture.name] = follow(prepared, _files_of(architecture, values) if several else values)
        if several:
            click.echo("; ".join(f"{name}: {_WORDS.get(code, 'not conformant')}" for name, code in codes.items()))
        # Interrupted, the kit's own failure, not conformant, cut short, nothing ran.
        return next((code for code in (2, 3, 1, 7, 5) if code in codes.values()), 0)


_WORDS = {0: "nothing failed", 2: "interrupted", 3: "the kit itself failed", 5: "nothing ran"}


def _files_of(architecture: Architecture, values: dict[str, Any]) -> dict[str, Any]:
    """The options with a file per architecture: ``out-sm90.json``."""
    named = dict(values)
    for option in ("json_file", "html_file", "junit_file"):
        if values[option]:
            path = Path(values[option])
            named[option] = str(path.with_name(f"{path.stem}-{architecture.name.replace(' ', '-')}{path.suffix}"))
    return named
