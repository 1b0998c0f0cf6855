"""What a case-run costs: case-runs per second by backend, mode and execution, and where the time goes.

    python ci/bench.py --backend torch_native --device cpu --seconds 5

One worker at a time, small shapes.
A graph case-run is everything: a backend instance, both buckets warmed up and captured,
eight or nine replays, three or four eager runs between them, the oracle and all checks. Nothing is asserted; figures
belong to the machine that is printed above them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from attn_testkit.results import Status

if TYPE_CHECKING:
    from attn_testkit.running.loop import Runner
    from attn_testkit.running.request import Item, Plan

CASES = {
    "decode": "decode-gqa4x2-d64-bf16-p16-k15.16.17-shuffled-gauss-b4prod",
    "target-verify": "target-verify-gqa4x2-d64-bf16-p16-k15.16.17-chain4-shuffled-gauss-b4prod",
    "draft-extend": "draft-extend-gqa4x2-d64-bf16-p16-k15.16.17-n4a1.3.2-shuffled-gauss-b4prod",
    "draft-extend-v2": "draft-extend-v2-gqa4x2-d64-bf16-p16-k15.16.17-n4a1.3.2-shuffled-gauss-b4prod",
    "extend": "extend-gqa4x2-d64-bf16-p16-k15.16.17-n7a17.1.2-shuffled-gauss-b4prod",
    "draft-decode": "draft-decode-gqa4x2-d64-bf16-p16-k15.16.17-topk2steps4-shuffled-gauss-b4prod",
}
PHASES = ("setup", "eager", "capture", "replay", "read back", "oracle and checks")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--backend", "-b", "backends", multiple=True, default=("torch_native",), show_default=True, metavar="SPEC"
)
@click.option("--device", default="auto", show_default=True, metavar="auto|cuda|cpu")
@click.option("--seconds", default=3.0, show_default=True, help="Measuring time for each row.")
@click.option("--in-process", is_flag=True, help="Without the process of its own that a backend has in a run.")
def main(backends: tuple[str, ...], device: str, seconds: float, in_process: bool) -> None:
    """Measure and print; never fails on a figure."""
    import torch

    from attn_testkit.running.loop import Runner
    from attn_testkit.running.request import Options, Request

    torch.set_num_threads(1)
    console = Console(width=None if os.isatty(1) else 140)
    table = Table("backend", "mode", "execution", "runs/s", "ms each", *PHASES)
    shown = False
    with contextlib.closing(Runner(Options(in_process=in_process))) as runner:
        for backend in backends:
            for mode, case in CASES.items():
                plan = runner.plan(Request((backend,), modes=(mode,), device=device, cases=(case,)))
                if not shown:
                    how = "one process" if in_process else "a judge and a worker, which take turns"
                    console.print(f"{plan.header.device_name}, {_cpu()}, {how}, torch {torch.__version__}")
                    shown = True
                for item in plan.items:
                    each, spent = _measure(runner, plan, item, seconds)
                    cells = [f"{spent[phase]:.2f}" for phase in PHASES]
                    table.add_row(backend, mode, item.execution, f"{1000 / each:.1f}", f"{each:.1f}", *cells)
    console.print(table)


def _measure(runner: Runner, plan: Plan, item: Item, seconds: float) -> tuple[float, dict[str, float]]:
    """Milliseconds of one case-run, and of each of its phases."""
    list(runner.run(plan, [item] * 3))
    spent: dict[str, float] = defaultdict(float)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for result in runner.run(plan, [item] * 5):
            if result.status is not Status.PASSED:
                first = result.findings[0].headline if result.findings else result.reason
                raise click.ClickException(f"{item.backend} fails {item.case}: {first}")
            for name, value in result.seconds.items():
                spent[name] += 1000 * value
            count += 1
    each = 1000 * (time.perf_counter() - start) / count
    return each, defaultdict(float, {name: value / count for name, value in spent.items()})


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
