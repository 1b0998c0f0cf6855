"""``demo``: a known bug, the test that it passes, and what the kit reports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import click

from ..registry import UsageError
from ..reports.outcome import Results
from ..reports.record import Report, refuse_unwritable, write_text
from ..results.case_result import BAD, CaseResult, Status
from ..results.failure_text import format_failure
from ..running.check_backend import run_request
from ..running.planning.request import Options, Request
from .options import run_option
from .run import terminated_like_interrupted

_BUG, _FIXED = "attn_testkit.examples.demo:StaleLength", "attn_testkit.examples.demo:Fixed"
_CASE = "decode-gqa2x2-d64-bf16-p16-k5.40.17-shuffled-gauss-b3prod"
_ORDINARY = "attn_testkit.examples.ordinary_test"
_PAGE = "attn-testkit-demo.html"
_STORY = """\
The bug: a decode kernel is launched for the longest request of its batch. A CUDA graph repeats the launch that it
captured, so a longer request in a later batch loses keys. TensorRT-LLM #17273 and vLLM #41834 are this bug.
"""

_WITHOUT_RELU, _WITH_RELU = "attn_testkit.examples.demo_sparse:WithoutRelu", "attn_testkit.examples.demo_sparse:Fixed"
_ALL_KEYS, _SOME_KEYS = (
    f"decode-mqa4-d64-bf16-p16-k{lens}-shuffled-gauss-sel16-idx4-b2prod" for lens in ("9.12", "100.37")
)
_STORY_OF_SPARSE = """\
The bug: the indexer of a sparse-attention backend leaves out ReLU, so negative products count and other keys are
selected. In a short context every key is selected, whatever its score. 1CatAI/1Cat-vLLM #250 is this bug.
"""
Row = tuple[bool, bool, str, str]
"""Values of a line: as expected, passed, what ran, by what."""


@click.command(
    short_help="Show a known bug, the test that it passes, and what the kit reports.",
    epilog="""\b
Examples:
  attn-testkit demo
  attn-testkit demo sparse
\b
Exit code 0: the runs went as described. 1: one of them did not.""",
)
@click.argument("topic", type=click.Choice(["sparse"]), required=False)
@click.option(
    "--html",
    "page",
    type=click.Path(),
    default=_PAGE,
    show_default=True,
    metavar="FILE",
    help="Write the report as a page.",
)
@run_option("device")
def demo(topic: str | None, page: str, device: str) -> int:
    """Show a known bug, the test that it passes, and what the kit reports.

    Four runs of one decode: eager, a CUDA graph that is replayed with the batch that it captured, a graph that is
    replayed with other batches, and both again with the bug fixed. With `sparse`: a backend that selects keys, first
    with all keys selected, then with 16 of 101, and both again with the bug fixed. Without a GPU, CUDA and its graphs
    are emulated.
    """
    refuse_unwritable(page)
    with terminated_like_interrupted():
        story, report, rows = _DEMOS[topic](device)
    click.echo(story)
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


def _of_graphs(device: str) -> tuple[str, Report, list[Row]]:
    """The story, the kit's four case-runs, and rows. The ordinary test runs at the same time."""
    request = Request((_BUG, _FIXED), modes=("decode",), device=device, cases=(_CASE,), command="demo")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with subprocess.Popen(
        [sys.executable, "-m", _ORDINARY, _BUG], stdout=subprocess.DEVNULL, env={**os.environ, **hidden}
    ) as ordinary:
        found = run_request(request, Options())
        ordinary_passed = ordinary.wait() == 0
    eager, graph = _passed(found.rows, _BUG, "eager"), _passed(found.rows, _BUG, "graph")
    fixed = _passed(found.rows, _FIXED, "eager") and _passed(found.rows, _FIXED, "graph")
    file = "attn_testkit/examples/ordinary_test.py"
    return (
        _STORY,
        _report(found),
        [
            (eager, eager, "eager", "the kit"),
            (ordinary_passed, ordinary_passed, "CUDA graph, replayed with the batch that it captured", file),
            (not graph, graph, "CUDA graph, replayed with other batches", "the kit"),
            (fixed, fixed, "with the bug fixed: eager, and replayed with other batches", "the kit"),
        ],
    )


def _of_sparse(device: str) -> tuple[str, Report, list[Row]]:
    """The story, the kit's four case-runs, and rows."""
    cases, both = (_ALL_KEYS, _SOME_KEYS), (_WITHOUT_RELU, _WITH_RELU)
    request = Request(both, modes=("decode",), executions=("eager",), device=device, cases=cases, command="demo")
    found = run_request(request, Options())
    short, long = (_passed(found.rows, _WITHOUT_RELU, "eager", case) for case in cases)
    fixed = all(_passed(found.rows, _WITH_RELU, "eager", case) for case in cases)
    return (
        _STORY_OF_SPARSE,
        _report(found),
        [
            (short, short, "10 and 13 keys: all are selected", "the kit"),
            (not long, long, "101 and 38 keys: 16 are selected", "the kit"),
            (fixed, fixed, "the bug fixed: all keys, and 16 of them", "the kit"),
        ],
    )


_DEMOS: Mapping[str | None, Callable[[str], tuple[str, Report, list[Row]]]] = {None: _of_graphs, "sparse": _of_sparse}


def _report(found: Results) -> Report:
    return Report(found.header, found.rows, finished=True, exit_code=found.exit_code, problems=found.problems)


def _passed(results: Sequence[CaseResult], backend: str, execution: str, case: str = _CASE) -> bool:
    found = [r for r in results if (r.backend, r.execution, r.case) == (backend, execution, case)]
    if len(found) != 1:
        raise UsageError(f"the demo expected one case-run of {backend} in {execution}, and found {len(found)}")
    return found[0].status is Status.PASSED
