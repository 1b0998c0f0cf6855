"""What a case-run costs: case-runs per second by backend, mode and execution, and where the time goes.

    python ci/bench.py --backend torch_native --device cpu --seconds 5

One process, small shapes. A graph case-run is everything: a backend instance, both buckets warmed up and captured,
eight or nine replays, three or four eager runs between them, the oracle and all checks. Nothing is asserted; figures
belong to the machine that is printed above them.
"""

from __future__ import annotations

import os
import platform
import time
from collections import defaultdict

import click
from rich.console import Console
from rich.table import Table

CASES = {
    "decode": "decode-gqa4x2-d64-bf16-p16-k15.16.17-shuffled-gauss-b4prod",
    "target-verify": "target-verify-gqa4x2-d64-bf16-p16-k15.16.17-chain4-shuffled-gauss-b4prod",
    "draft-extend": "draft-extend-gqa4x2-d64-bf16-p16-k15.16.17-n4a1.3.2-shuffled-gauss-b4prod",
    "draft-extend-v2": "draft-extend-v2-gqa4x2-d64-bf16-p16-k15.16.17-n4a1.3.2-shuffled-gauss-b4prod",
}
PHASES = ("setup", "eager", "capture", "replay", "read back", "oracle and checks")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--backend", "-b", "backends", multiple=True, default=("torch_native",), show_default=True, metavar="SPEC"
)
@click.option("--device", default="auto", show_default=True, metavar="auto|cuda|cpu")
@click.option("--seconds", default=3.0, show_default=True, help="Measuring time for each row.")
@click.option("--threads", default=1, show_default=True, help="CPU threads of torch.")
def main(backends: tuple[str, ...], device: str, seconds: float, threads: int) -> None:
    """Measure and print; never fails on a figure."""
    import torch

    from attn_testkit.graphs.capture import settle
    from attn_testkit.running.plan import plan_run, run_item

    torch.set_num_threads(threads)
    console = Console(width=None if os.isatty(1) else 140)
    table = Table("backend", "mode", "execution", "runs/s", "ms each", *PHASES)
    shown = False
    for backend in backends:
        for mode, case in CASES.items():
            plan = plan_run(backends=[backend], modes=[mode], device=device, cases=[case])
            if not shown:
                console.print(f"{plan.header.device_name}, {_cpu()}, {threads} thread(s), torch {torch.__version__}")
                shown = True
            for item in plan.items:
                for _ in range(3):
                    run_item(item, plan)
                settle()
                spent: dict[str, float] = defaultdict(float)
                count, start = 0, time.perf_counter()
                while time.perf_counter() - start < seconds:
                    result = run_item(item, plan)
                    if result.findings:
                        raise click.ClickException(f"{backend} fails {case}: {result.findings[0].headline}")
                    for name, value in result.seconds.items():
                        spent[name] += value
                    count += 1
                each = (time.perf_counter() - start) / count
                cells = [f"{1000 * spent[p] / count:.2f}" for p in PHASES]
                table.add_row(backend, mode, item.execution.value, f"{1 / each:.1f}", f"{1000 * each:.1f}", *cells)
    console.print(table)


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
