"""``demo``: a known bug, the test that it passes, and what the kit reports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import click

from ..registry import UsageError
from ..reports.record import Report, refuse_unwritable, write_text
from ..results.case_result import BAD, CaseResult, Status
from ..results.failure_text import format_failure
from ..running.check_backend import run_request
from ..running.planning.request import Options, Request
from .options import device_option
from .run import terminated_like_interrupted

__all__ = ["demo"]

_BUG, _FIXED = "attn_testkit.examples.demo:StaleLength", "attn_testkit.examples.demo:Fixed"
_CASE = "decode-gqa2x2-d64-bf16-p16-k5.40.17-shuffled-gauss-b3prod"
_ORDINARY = "attn_testkit.examples.ordinary_test"
_PAGE = "attn-testkit-demo.html"
_STORY = """\
The bug: a decode kernel is launched for the longest request of its batch. A CUDA graph repeats the launch that it
captured, so a longer request in a later batch loses keys. TensorRT-LLM #17273 and vLLM #41834 are this bug.
"""


@click.command(
    short_help="Show a known bug, the test that it passes, and what the kit reports.",
    epilog="""\b
Examples:
  attn-testkit demo
\b
Exit code 0: the four runs went as described. 1: one of them did not.""",
)
@click.option(
    "--html",
    "page",
    type=click.Path(),
    default=_PAGE,
    show_default=True,
    metavar="FILE",
    help="Write the report as a page.",
)
@device_option
def demo(page: str, device: str) -> int:
    """Show a known bug, the test that it passes, and what the kit reports.

    Four runs of one decode: eager, a CUDA graph that is replayed with the batch that it captured, a graph that is
    replayed with other batches, and both again with the bug fixed. Without a GPU, CUDA and its graphs are emulated.
    """
    refuse_unwritable(page)
    with terminated_like_interrupted():
        report, ordinary = _run(device)
    rows = _rows(report.results, ordinary)
    click.echo(_STORY)
    for as_expected, passed, what, ran in rows:
        click.echo(f"  {'passes' if passed else 'FAILS '}   {what:58} {ran}" + ("" if as_expected else "  UNEXPECTED"))
    click.echo(f"\nDevice: {report.header.device_name}. The kit's report:\n")
    for result in report.results:
        if result.status in BAD:
            click.echo(format_failure(result, report.header))
    if page:
        from ..reports.render import html_page

        write_text(page, html_page(report))
        click.echo(f"\nThe same as a page: {page}")
    click.echo("Next: `attn-testkit new` writes an adapter for your kernel, `attn-testkit run` tests it.")
    return 0 if all(as_expected for as_expected, *_ in rows) else 1


def _run(device: str) -> tuple[Report, bool]:
    """The kit's four case-runs, and whether the ordinary test passes, which runs at the same time."""
    request = Request((_BUG, _FIXED), modes=("decode",), device=device, cases=(_CASE,), command="demo")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with subprocess.Popen(
        [sys.executable, "-m", _ORDINARY, _BUG], stdout=subprocess.DEVNULL, env={**os.environ, **hidden}
    ) as ordinary:
        found = run_request(request, Options())
        passed = ordinary.wait() == 0
    return Report(found.header, found.rows, finished=True, exit_code=found.exit_code, problems=found.problems), passed


def _rows(results: Sequence[CaseResult], ordinary: bool) -> list[tuple[bool, bool, str, str]]:
    """(as expected, passed, what ran, by what) of each line."""

    def passed(backend: str, execution: str) -> bool:
        found = [r for r in results if (r.backend, r.execution) == (backend, execution) and r.case]
        if len(found) != 1:
            raise UsageError(f"the demo expected one case-run of {backend} in {execution}, and found {len(found)}")
        return found[0].status is Status.PASSED

    eager, graph = passed(_BUG, "eager"), passed(_BUG, "graph")
    fixed = passed(_FIXED, "eager") and passed(_FIXED, "graph")
    file = "attn_testkit/examples/ordinary_test.py"
    return [
        (eager, eager, "eager", "the kit"),
        (ordinary, ordinary, "CUDA graph, replayed with the batch that it captured", file),
        (not graph, graph, "CUDA graph, replayed with other batches", "the kit"),
        (fixed, fixed, "the bug fixed: eager, and replayed with other batches", "the kit"),
    ]
