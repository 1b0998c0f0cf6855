"""Cost of the pytest plugin: seconds to collect many case-runs, and milliseconds per case-run.

    python ci/bench_pytest.py --cases 20000

No backend runs: a judge without torch, this file, plans case-runs with ids of a real length and passes each at once, so
only pytest, the plugin, and the pipe to the judge are measured. The two forms, the suite and ``conformance_cases``, are
compared with pytest by itself: an empty test with as many parameters and the same ids. A start is a run of two
case-runs, and is subtracted. Seconds are CPU time: on a shared machine wall time is not reliable. ``--plan TIER``
measures real planning. Nothing is asserted.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.run_header import RunHeader
from attn_testkit.running.planning.request import Item, Options, Plan, Request

_ID = "decode-gqa4x2-d64-bf16-p16-k15.16.17x2-shuffled-gauss-b4prod-s{}"
_BACKEND = "bench:{}"
"""Name of a backend with this many case-runs."""
_CONFTEST = """
    import attn_testkit.running.processes.judge_process as judge_process
    judge_process.RUNNER = "bench_pytest"
"""
_OWN = """
    import attn_testkit

    @attn_testkit.conformance_cases("{backend}")
    def test_conformance(attn_case):
        attn_case()
"""
_ALONE = """
    import pytest

    @pytest.mark.parametrize("number", range({count}), ids=["{backend}-eager-{id}".format(n) for n in range({count})])
    def test_nothing(number):
        pass
"""


class Runner:
    """A judge that plans as many case-runs as the backend's name says, and passes them."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def plan(self, request: Request) -> Plan:
        """Plan as many case-runs as requested."""
        spec = request.candidates[0].spec
        items = tuple(Item(spec, "decode", "eager", _ID.format(n)) for n in range(int(spec.partition(":")[2])))
        header = RunHeader(
            "0", "2026-01-01T00:00:00", request.command, request.tier, 0, "emulated", "none", {}, {spec: ""}, len(items)
        )
        return Plan(header, items, (), request.candidates, request.device)

    def run(self, plan: Plan, items: Sequence[Item]) -> Iterator[CaseResult]:
        """Return a passed result for each item."""
        for item in items:
            yield CaseResult(item.backend, item.mode, item.execution, item.case, Status.PASSED, checks=("completes",))

    def close(self) -> None:
        """Do nothing: there is no process to end."""


@dataclass(frozen=True)
class _Form:
    """One way to run case-runs as tests."""

    name: str
    test: str = ""
    args: tuple[str, ...] = ()

    def files(self, count: int) -> dict[str, str]:
        backend = _BACKEND.format(count)
        text = self.test.replace("{backend}", backend).replace("{count}", str(count)).replace("{id}", _ID)
        return {"conftest.py": _CONFTEST, "pytest.ini": "[pytest]\n", **({"test_mine.py": text} if text else {})}


_FORMS = (
    _Form("pytest alone", _ALONE),
    _Form("conformance_cases", _OWN),
    _Form("the suite", args=("--pyargs", "attn_testkit.suite", "--attn-backend={backend}")),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--cases", "count", default=20_000, show_default=True, metavar="N", help="Case-runs to collect.")
@click.option("--runs", default=4_000, show_default=True, metavar="N", help="Case-runs to run.")
@click.option(
    "--plan", "tiers", multiple=True, metavar="TIER", help="Also what planning this tier of torch_native takes."
)
@click.option("--xdist", is_flag=True, help="Also with two workers of xdist.")
def main(count: int, runs: int, tiers: tuple[str, ...], xdist: bool) -> None:
    """Measure and print; never fails on a figure."""
    for form in _FORMS:
        start = _seconds(form, 2, "--collect-only")
        collected = _seconds(form, count, "--collect-only") - start
        click.echo(f"{form.name}: start {start:.2f} s, {count} collected in {collected:.2f} s")
        for name, args in (("", ()), *([(", two workers", ("-n2",))] if xdist else [])):
            all_ = _seconds(form, runs, *args) - _seconds(form, 2, *args)
            only = 0.0 if args else _seconds(form, runs, "--collect-only") - start
            click.echo(f"{form.name}{name}: {1000 * (all_ - only) / runs:.2f} ms for each case-run that runs")
    for tier in tiers:
        click.echo(f"planning {tier} of torch_native: {_planned(tier)}")


def _seconds(form: _Form, count: int, *args: str) -> float:
    """CPU time of one session of pytest and of what it started."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in form.files(count).items():
            Path(folder, name).write_text(textwrap.dedent(text))
        own = [arg.replace("{backend}", _BACKEND.format(count)) for arg in form.args]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        before = _cpu()
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-q", "-p", "no:cacheprovider", *own, *args],
            cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        spent = _cpu() - before
    if ended.returncode:
        raise click.ClickException(
            f"pytest ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
        )
    return spent


def _cpu() -> float:
    """CPU time of every process that was started here and has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _planned(tier: str) -> str:
    """Seconds of planning in a fresh process, separately from importing torch."""
    code = f"""
        import time; t = time.process_time(); import torch; t = time.process_time() - t
        from attn_testkit.backends.torch_native import TorchNativeBackend as Backend
        from attn_testkit.running.planning.plan import plan_run
        from attn_testkit.running.planning.request import Request
        s = time.process_time()
        plan = plan_run(Request(("torch_native",), tier={tier!r}, device="cpu"), lambda _: Backend.capabilities)
        s = time.process_time() - s
        print(f"{{len(plan.items)}} case-runs in {{s:.2f}} s, plus {{t:.2f}} s of importing torch")
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    return found.stdout.strip()


if __name__ == "__main__":
    main()
