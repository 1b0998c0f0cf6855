"""``record``: turn the attention calls of a running server into cases."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attn_testkit.registry import UsageError
from attn_testkit.reports.record import refuse_unwritable
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.processes.judge_process import JudgeProcess

if TYPE_CHECKING:
    from attn_testkit.contract import Capabilities

    from ..record.cases import Recorded

STARTUP = Path(__file__).resolve().parents[1] / "record" / "startup"
"""The folder that, on PYTHONPATH, makes every Python process watch SGLang's backends."""


@click.command(
    short_help="Record the attention calls of a running server as test cases.",
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
Examples:
  attn-testkit record --to calls.jsonl -- python -m sglang.launch_server --model-path ...
  attn-testkit record --cases calls.jsonl > ids.txt
  attn-testkit run --backend sglang:triton --cases-from ids.txt""",
)
@click.option("--to", metavar="FILE", help="Append the calls of COMMAND's processes to this file.")
@click.option("--waits", is_flag=True, help="With --to: sometimes copy lengths that only the device has.")
@click.option("--cases", metavar="FILE", help="Print the cases nearest to the calls in this file.")
@click.option("--backend", "-b", metavar="SPEC", help="With --cases: only what this backend declares.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def record(to: str | None, waits: bool, cases: str | None, backend: str | None, command: tuple[str, ...]) -> int:
    """Record the attention calls of a running server and turn them into test cases.

    COMMAND starts a server on SGLang. Shapes, lengths, hooks and flags are recorded, no data. With --cases, the ids of
    the nearest cases are printed, for `run --cases-from`; what no case can express is listed on stderr.
    """
    if bool(to and command) == bool(cases):
        raise UsageError("give --to FILE -- COMMAND to record a server, or --cases FILE to make cases of a recording")
    if to:
        return _run(Path(to), waits, command)
    assert cases is not None
    return _print_cases(Path(cases), backend)


def _run(file: Path, waits: bool, command: tuple[str, ...]) -> int:
    """Run the command under the recorder, and return its exit code."""
    refuse_unwritable(str(file))
    before = os.environ.get("PYTHONPATH")
    path = f"{STARTUP}{os.pathsep}{before}" if before else str(STARTUP)
    environment = {**os.environ, "ATTN_TESTKIT_RECORD": str(file.resolve()), "PYTHONPATH": path}
    if waits:
        environment["ATTN_TESTKIT_RECORD_WAITS"] = "1"
    try:
        code = subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}") from error
    lines = file.read_text("utf-8").count("\n")
    click.echo(f"attn-testkit: {lines} lines in {file}; next: attn-testkit record --cases {file}", err=True)
    return code if code >= 0 else 128 - code


def _print_cases(file: Path, backend: str | None) -> int:
    from ..record.cases import Unreadable, cases_of, read_lines

    try:
        lines = read_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    except Unreadable as error:
        raise UsageError(str(error)) from None
    found = cases_of(lines, _capabilities(backend) if backend else None)
    for name in found.cases:
        click.echo(name)
    _print_remarks(found)
    return 0 if found.cases else 5


def _capabilities(backend: str) -> Capabilities:
    with contextlib.closing(JudgeProcess(device="cpu")) as judge:
        return judge.capabilities(Candidate(backend), "cpu")


def _print_remarks(found: Recorded) -> None:
    click.echo(f"{len(found.cases)} cases", err=True)
    for remark in dict.fromkeys(each for differs in found.differs.values() for each in differs):
        count = sum(remark in differs for differs in found.differs.values())
        click.echo(f"  not as recorded in {count}: {remark}", err=True)
    for reason, count in found.skipped.most_common():
        click.echo(f"  no case for {count} batches: {reason}", err=True)
