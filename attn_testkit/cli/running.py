"""``run`` and ``repro``."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ..registry import UsageError
from ..reports.record import Record, Report, cannot_write
from ..results import BAD, CaseResult, Status, format_failure
from ..running.gpus import visible_gpus
from ..running.pool import Worker, WorkerStartError, run_isolated
from ..running.request import Prepared, Request, final_code, prepare, run_here
from .options import backend_option, device_option, execution_option, request_from, selection_options
from .show import Watch, echo_header, print_summary

if TYPE_CHECKING:
    from ..running.plan import RunPlan

__all__ = ["repro", "run"]


@click.command(
    short_help="Judge backends in every mode and execution they claim.",
    epilog="""\b
Examples:
  attn-testkit run --backend triton --device cpu
  attn-testkit run --backend my_pkg.attn:MyBackend --mode decode --execution graph --tier core
  attn-testkit run --backend my_pkg.attn:MyBackend --tier full --jobs 8 --json out.json --html out.html""",
)
@selection_options
@click.option("--known-failures", type=click.Path(), metavar="FILE", help="TOML of failures that are tolerated.")
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Record, complete at every moment.")
@click.option("--html", "html_file", type=click.Path(), metavar="FILE", help="The same as a page.")
@click.option("--jobs", "-j", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Processes.")
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=300.0, show_default=True, metavar="S",
    help="Seconds that one case-run may take.",
)  # fmt: skip
@click.option("--in-process", is_flag=True, help="No child process: for debuggers; a crash ends the run.")
@click.option("--max-failures", type=click.IntRange(1), metavar="N", help="Stop after N case-runs that did not pass.")
@click.option("-x", "stop_first", is_flag=True, help="The same with N = 1.")
@click.option("--verbose", "-v", is_flag=True, help="Tell every failure in full.")
def run(**values: Any) -> int:
    """Judge backends in every mode and execution that they claim.

    Failures are printed as they come; at the end a table and one line of verdict. Each case-run happens in a child
    process, so a backend that crashes or hangs costs one case-run.
    """
    request = request_from(values)
    _refuse_clashes(values)
    with _terminated_like_interrupted():
        return _run(request, values)


def _refuse_clashes(values: dict[str, Any]) -> None:
    if values["in_process"] and values["jobs"] > 1:
        raise UsageError("--in-process runs in one process; leave out --jobs")
    if values["stop_first"] and values["max_failures"]:
        raise UsageError("-x is --max-failures 1; give one of them")


def _run(request: Request, values: dict[str, Any]) -> int:
    isolated = not values["in_process"]
    gpus = _gpus_to_share(request, values["jobs"])
    # The child imports torch while this process imports it to plan.
    spare = _spare(values, gpus) if isolated and request.backends else None
    try:
        prepared = prepare(request, values["known_failures"])
        echo_header(prepared.plan.header)
        for warning in prepared.ledger.warnings():
            click.echo(f"warning: {warning}", err=True)
        if isolated:
            source = run_isolated(
                prepared.plan,
                timeout_s=values["timeout"],
                jobs=values["jobs"],
                gpus=gpus,
                engine=_engine(),
                spare=spare,
            )
        else:
            source = run_here(prepared.plan)
        limit = 1 if values["stop_first"] else values["max_failures"]
        return _follow(prepared, source, values, limit)
    finally:
        if spare is not None:
            spare.close()


def _spare(values: dict[str, Any], gpus: tuple[str, ...]) -> Worker:
    return Worker(_engine(), values["timeout"], gpu=gpus[0] if gpus else "")


def _engine() -> str:
    # Looked up in sys.modules, so that a stand-in for the engine is also what the child processes import.
    module = sys.modules.get("attn_testkit.running.plan")
    return module.__name__ if module else "attn_testkit.running.plan"


def _gpus_to_share(request: Request, jobs: int) -> tuple[str, ...]:
    if jobs == 1 or request.device not in ("auto", "cuda"):
        return ()
    gpus = visible_gpus(os.environ)
    return gpus if len(gpus) > 1 else ()


def _follow(prepared: Prepared, source: Iterator[CaseResult], values: dict[str, Any], limit: int | None) -> int:
    header = prepared.plan.header
    record = Record(values["json_file"], header) if values["json_file"] else None
    if values["html_file"]:
        # Now, not after hours, is the time to learn that it cannot be written.
        write_text(values["html_file"], "<!doctype html><title>running</title>The run has not ended yet.")
    results: list[CaseResult] = []
    interrupted = False
    try:
        with _closing(source), Watch(len(prepared.plan.items), header, verbose=values["verbose"]) as watch:
            for raw in itertools.chain(prepared.given, source):
                result = prepared.ledger.judge(raw)
                results.append(result)
                if record:
                    record.add(result)
                watch.see(result)
                if limit and sum(r.status in BAD for r in results) >= limit:
                    click.echo(f"stopped after {limit} that did not pass", err=True)
                    break
    except KeyboardInterrupt:
        interrupted = True
    except WorkerStartError as error:
        click.echo(f"attn-testkit: {error}", err=True)
        if record:
            record.close()
        return 3
    problems = [] if interrupted else prepared.problems()
    code = final_code(header, results, problems, interrupted)
    if record:
        record.finish(code, interrupted=interrupted, problems=problems)
    if values["html_file"]:
        _write_html(Report(header, tuple(results), not interrupted, interrupted, code, tuple(problems)), values)
    print_summary(header, results, problems=problems, interrupted=interrupted, code=code)
    return code


def _write_html(report: Report, values: dict[str, Any]) -> None:
    from ..reports.render import html_page

    write_text(values["html_file"], html_page(report))


def write_text(path: str, text: str) -> None:
    """Write a file. Raises ``UsageError``, in one line, when it cannot be written."""
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise cannot_write(Path(path), error) from error


@contextlib.contextmanager
def _closing(source: Iterator[CaseResult]) -> Iterator[None]:
    try:
        yield
    finally:
        if isinstance(source, Generator):
            source.close()


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    # A CI job that is cancelled sends SIGTERM: its report must be closed like one that somebody interrupts.
    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command(
    short_help="Run one case again, in this process.",
    epilog="""\b
Examples:
  attn-testkit repro --backend triton decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod
  python -m pdb -m attn_testkit repro --backend my_pkg.attn:MyBackend --execution eager CASE""",
)
@backend_option
@click.argument("case")
@execution_option
@device_option
def repro(backends: tuple[str, ...], case: str, executions: tuple[str, ...], device: str) -> int:
    """Run one case again, in this process: a debugger, a sanitizer or a print works as usual.

    CASE is the id that a failure names; it alone rebuilds the case, whatever the tier.
    """
    request = Request(backends, executions=executions, device=device, cases=(case,))
    plan = request.plan()
    echo_header(plan.header)
    results = list(plan.given)
    for result in run_here(plan):
        results.append(result)
        _tell(result, plan)
    if not plan.items:
        for row in plan.given:
            click.echo(format_failure(row, plan.header))
        click.echo("attn-testkit: nothing ran", err=True)
    return final_code(plan.header, results)


def _tell(result: CaseResult, plan: RunPlan) -> None:
    if result.status is not Status.PASSED:
        click.echo(format_failure(result, plan.header))
        return
    margin = "" if result.margin is None else f", margin {result.margin:.2f}"
    seconds = ", ".join(f"{phase} {spent:.3f} s" for phase, spent in result.seconds.items())
    click.echo(f"{result.case} ({result.execution}): passed{margin}; {seconds}")
