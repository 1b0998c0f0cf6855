"""``repro``: run one case again."""

from __future__ import annotations

import contextlib

import click

from ..registry import UsageError, unknown
from ..results.case_result import CaseResult, Status
from ..results.failure_text import format_failure
from ..results.names import EXECUTIONS
from ..running.planning.request import Options, Plan, Request, final_code
from ..running.processes.judge_process import judge_for
from .options import run_option
from .run import NO_GATE
from .show import echo_header


@click.command(
    short_help="Run one case again.",
    epilog="""\b
Examples:
  attn-testkit repro --backend triton decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod
  attn-testkit repro --backend triton --execution graph --after eager:OTHER_CASE CASE
  python -m pdb -m attn_testkit repro --in-process --backend my_pkg.attn:MyBackend --execution eager CASE""",
)
@run_option("backends")
@click.argument("case")
@run_option("executions")
@run_option("device")
@click.option(
    "--after", multiple=True, metavar="CASE",
    help="Run another case first in the same process; write eager:CASE or graph:CASE if its execution differs; "
    "repeatable.",
)  # fmt: skip
@run_option("in_process", help="Run the backend in this process: debuggers, sanitizers and print work.")
@click.option("--verbose", "-v", is_flag=True, help="Show how the limit of the failing element is computed, too.")
def repro(
    backends: tuple[str, ...],
    case: str,
    executions: tuple[str, ...],
    device: str,
    after: tuple[str, ...],
    in_process: bool,
    verbose: bool,
) -> int:
    """Run one case again, in a child process as the original run did.

    CASE is the id in the failure; the case is rebuilt from it, whatever the tier. --after is for a backend that keeps
    state from one case-run to the next.
    """
    before = tuple(_with_execution(each, executions) for each in after)
    request = Request(backends, executions=executions, device=device, cases=(case,))
    with contextlib.closing(judge_for(Options(in_process=in_process, after=before, diagnose="all"), device)) as judge:
        plan = judge.plan(request)
        echo_header(plan.header)
        if in_process:
            click.echo(NO_GATE, err=True)
        results = list(plan.preset)
        for result in judge.run(plan, plan.items):
            results.append(result)
            _report(result, plan)
            if verbose and result.status is Status.FAILED:
                from .explain_limit import explain_limit_of  # imports torch, which a plain repro does not need

                explain_limit_of(result)
    if not plan.items:
        for row in plan.preset:
            click.echo(format_failure(row, plan.header))
        click.echo("attn-testkit: nothing ran", err=True)
    return final_code(plan.header, results)


def _with_execution(name: str, executions: tuple[str, ...]) -> str:
    """Put the execution before the name of a case, as in ``eager:CASE``, unless it is there already."""
    execution, separator, _ = name.partition(":")
    if not separator:
        return f"{executions[0] if len(executions) == 1 else 'eager'}:{name}"
    if execution not in EXECUTIONS:
        raise UsageError(unknown("execution", execution, EXECUTIONS))
    return name


def _report(result: CaseResult, plan: Plan) -> None:
    if result.status is not Status.PASSED:
        click.echo(format_failure(result, plan.header))
        return
    margin = "" if result.margin is None else f", margin {result.margin:.2f}"
    seconds = ", ".join(f"{phase} {spent:.3f} s" for phase, spent in result.seconds.items())
    click.echo(f"{result.case} ({result.execution}): passed{margin}; {seconds}")
    for line in result.printed.splitlines():
        click.echo(f"  printed  {line}")
