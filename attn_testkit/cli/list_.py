"""``list``: the registered backends, or the cases that a run would run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from ..registry import BackendInfo, UsageError, registered_backends
from ..reports.record import plain
from ..running.planning.request import prepare
from ..running.processes.judge_process import JudgeProcess
from .options import asked_for, selection_options
from .show import out


@click.command(
    "list",
    short_help="Show the registered backends, or the cases of a run.",
    epilog="""\b
Examples:
  attn-testkit list
  attn-testkit list --cases --backend triton --mode target-verify --tier core
  attn-testkit list --json""",
)
@click.option("--cases", "show_cases", is_flag=True, help="Print the case ids that a run with these options would run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@selection_options
def list_(show_cases: bool, as_json: bool, **values: Any) -> int:
    """Show the registered backends and what they declare; with --cases, the ids of the cases that a run would run.

    A backend need not be registered: you can name it module:Class.
    """
    request, _ = asked_for(values)
    if show_cases:
        with contextlib.closing(JudgeProcess(device=request.device)) as judge:
            items = prepare(judge, request).items
        if as_json:
            rows = [{"backend": i.backend, "mode": i.mode, "execution": i.execution, "case": i.case} for i in items]
            click.echo(json.dumps(rows, indent=1))
        else:
            for case in dict.fromkeys(item.case for item in items):
                click.echo(case)
        return 0 if items else 5
    if request.backends:
        raise UsageError("list shows every registered backend; did you mean list --cases --backend SPEC?")
    backends = _described(request.device)
    if as_json:
        click.echo(json.dumps([{**plain(dataclasses.asdict(b)), "origin": str(b.origin)} for b in backends], indent=1))
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("backend", "from", "declares"):
        table.add_column(name, overflow="fold")
    for backend in backends:
        declared = Text(backend.capabilities) if not backend.failure else Text(backend.failure, style="red")
        table.add_row(Text(backend.name), Text(f"{backend.origin}\n{backend.spec}"), declared)
    out().print(table)
    return 0


def _described(device: str) -> list[BackendInfo]:
    """Every registered backend with its capabilities, each imported in its own process."""
    backends = registered_backends()
    with contextlib.closing(JudgeProcess(device=device)) as judge:
        lines = judge.capabilities_lines([backend.name for backend in backends], device)
    return [
        dataclasses.replace(backend, capabilities=declared, failure=failure)
        for backend, (declared, failure) in zip(backends, lines, strict=True)
    ]
