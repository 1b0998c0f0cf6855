"""Cost of a run: its start, its lists of cases, its memory, checked replays, layer-steps and eager steps per second,
and time by phase; of a small case of each mode, and of every ``--core-every``-th case-run of core.

    python ci/bench.py --backend torch_native --device cpu --json before.json
    python ci/bench.py --backend torch_native --device cpu --against before.json
    python ci/bench.py --backend torch_native --device cpu --profile

One worker, small shapes. A graph case-run is everything: a backend instance, both buckets warmed up and captured, every
replay, the eager runs between them, the oracle and all checks. CPU time is that of all processes together, and on a
shared machine it is what to compare. Nothing is asserted; figures belong to the machine that is printed above them.
"""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from bench_profile import Sampler
from bench_record import OtherMachine, Record, Row, changed_versions, check_same, compared, machine, read, tenths, write
from rich.console import Console
from rich.table import Table

from attn_testkit.results.case_result import Status

if TYPE_CHECKING:
    from attn_testkit.contract import Capabilities
    from attn_testkit.running.planning.request import Item, Judge, Plan

CASES = {
    "decode": "decode-gqa4x2-d64-bf16-p16-k15.16.17-shuffled-gauss-b4prod",
    "target-verify": "target-verify-gqa4x2-d64-bf16-p16-k15.16.17-chain4-shuffled-gauss-b4prod",
    "draft-extend": "draft-extend-gqa4x2-d64-bf16-p16-k15.16.17-n4a1.3.2-shuffled-gauss-b4prod",
    "draft-extend-v2": "draft-extend-v2-gqa4x2-d64-bf16-p16-k15.16.17-n4a1.3.2-shuffled-gauss-b4prod",
    "extend": "extend-gqa4x2-d64-bf16-p16-k15.16.17-n7a17.1.2-shuffled-gauss-b4prod",
    "draft-decode": "draft-decode-gqa4x2-d64-bf16-p16-k15.16.17-topk2steps4-shuffled-gauss-b4prod",
}
PHASES = ("setup", "eager", "capture", "replay", "read back", "oracle and checks")
_WARM_UP = 3
_AT_ONCE = 5
"""Number of case-runs between two readings of the clock."""
_SAMPLED_EVERY = 0.25
"""Seconds between two measurements of a run's memory."""
_KIT = (f"{os.sep}attn_testkit{os.sep}", f"{os.sep}runner_modes{os.sep}")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--backend", "-b", "backends", multiple=True, default=("torch_native",), show_default=True, metavar="SPEC"
)
@click.option("--device", default="auto", show_default=True, metavar="auto|cuda|cpu")
@click.option("--seconds", default=3.0, show_default=True, help="Measuring time for each row.")
@click.option(
    "--core-every", default=0, metavar="N", help="Also run every Nth case-run of core with graphs, once; 0: none."
)
@click.option("--in-process", is_flag=True, help="Without the processes that a run has: no start, no memory.")
@click.option("--profile", is_flag=True, help="Show where CPU time goes. Implies --in-process.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Keep the figures.")
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True),
    metavar="FILE",
    help="Compare with figures that --json kept on this machine.",
)
def main(
    backends: tuple[str, ...],
    device: str,
    seconds: float,
    core_every: int,
    in_process: bool,
    profile: bool,
    json_file: Path | None,
    against: Path | None,
) -> None:
    """Measure and print; never fails on a figure."""
    before = _read(against) if against else None
    # The tensors are tiny, and waiting threads spin.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(width=None if os.isatty(1) else 180)
    how = _How(device, seconds, core_every, in_process or profile, profile, before)
    measured = [_of_backend(backend, how, console) for backend in backends]
    record = Record(
        measured[0].machine,
        measured[0].versions,
        tuple(row for each in measured for row in each.rows),
        {name: value for each in measured for name, value in each.start_s.items()},
        {name: value for each in measured for name, value in each.memory_mb.items()},
    )
    _print(console, record)
    if json_file:
        write(record, json_file)
    if before:
        _print_comparison(console, record, before)


def _read(path: Path) -> Record:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


@dataclass(frozen=True)
class _How:
    device: str
    seconds: float
    """Measuring time per row."""
    core_every: int
    """Distance of the case-runs of core that are measured together; 0: none are."""
    in_process: bool
    profile: bool
    before: Record | None
    """Figures to compare with."""


def _check_same(here: Mapping[str, str], before: Record | None) -> None:
    try:
        check_same(here, here if before is None else before.machine)
    except OtherMachine as error:
        raise click.ClickException(str(error)) from error


def _of_backend(backend: str, how: _How, console: Console) -> Record:
    from attn_testkit.running.planning.request import Options, Request
    from attn_testkit.running.processes.judge_process import JudgeProcess, judge_for

    device = how.device
    found: dict[Item, tuple[float, float, dict[str, float]]] = {}
    sampler = Sampler() if how.profile else None
    started = time.perf_counter()
    with contextlib.closing(judge_for(Options(in_process=how.in_process), device)) as judge, _memory(judge) as memory:
        plan = judge.plan(Request((backend,), tier="core", device=device))
        here = machine(plan.header.device_name, in_process=how.in_process)
        _check_same(here, how.before)
        start = {"start to the plan of core": time.perf_counter() - started}
        _results(judge, plan, plan.items[0], 1)
        start["start to the first result"] = time.perf_counter() - started
        for mode, case in CASES.items():
            for item in judge.plan(Request((backend,), modes=(mode,), device=device, cases=(case,))).items:
                found[item] = _measured(judge, plan, item, how.seconds)
                if sampler is not None:
                    _print_parts(console, sampler, judge, plan, item, how.seconds)
                    _print_profile(console, judge, plan, item)
        sample = [item for item in plan.items if item.execution == "graph"][:: how.core_every] if how.core_every else []
        of_sample = _together(judge, plan, sample) if sample else None
        if isinstance(judge, JudgeProcess):
            start |= _lists(judge.capabilities(plan.candidates[0], device))
    steps = _steps(plan, [*found, *sample])
    rows = [
        Row(backend, item.mode, item.execution, 1000 * each, 1000 * cpu, *(n / each for n in steps[item]), phases)
        for item, (each, cpu, phases) in found.items()
    ]
    if of_sample is not None:
        each, cpu, phases = of_sample
        counts = (sum(numbers) / len(sample) for numbers in zip(*(steps[item] for item in sample), strict=True))
        rows.append(
            Row(
                backend, f"{len(sample)} of core", "graph", 1000 * each, 1000 * cpu, *(n / each for n in counts), phases
            )
        )
    return Record(
        here,
        {"kit": plan.header.kit, **plan.header.versions},
        tuple(rows),
        {} if how.in_process else {f"{backend}: {name}": value for name, value in start.items()},
        {f"{backend}: {name}": size for name, size in memory.items()},
    )


def _lists(declared: Capabilities) -> dict[str, float]:
    """CPU seconds in which this process makes the cases of each tier, the shortest list first."""
    from attn_testkit.catalogue.tiers import TIERS, generate
    from attn_testkit.contract import ForwardMode

    spent = {}
    for tier in TIERS:
        started = time.process_time()
        count = sum(len(generate(declared, mode, tier)) for mode in ForwardMode)
        spent[f"the {count:,} cases of {tier} listed, CPU"] = time.process_time() - started
    return spent


def _results(judge: Judge, plan: Plan, item: Item, count: int) -> dict[str, float]:
    """Run ``count`` case-runs, and return their total seconds by phase."""
    spent: dict[str, float] = defaultdict(float)
    for result in judge.run(plan, [item] * count):
        if result.status is not Status.PASSED:
            first = result.findings[0].headline if result.findings else result.reason
            raise click.ClickException(f"{item.backend} fails {item.case}: {first}")
        for name, value in result.seconds.items():
            spent[name] += value
    return spent


def _measured(judge: Judge, plan: Plan, item: Item, seconds: float) -> tuple[float, float, dict[str, float]]:
    """Seconds of one case-run, of CPU time in it, and milliseconds of each of its phases."""
    _results(judge, plan, item, _WARM_UP)
    spent: dict[str, float] = defaultdict(float)
    count, start, cpu = 0, time.perf_counter(), _cpu_seconds(judge)
    while not count or time.perf_counter() - start < seconds:
        for name, value in _results(judge, plan, item, _AT_ONCE).items():
            spent[name] += value
        count += _AT_ONCE
    each = (time.perf_counter() - start) / count
    return each, (_cpu_seconds(judge) - cpu) / count, {name: 1000 * value / count for name, value in spent.items()}


def _together(judge: Judge, plan: Plan, items: Sequence[Item]) -> tuple[float, float, dict[str, float]]:
    """What ``_measured`` returns, of case-runs that differ, each run once: what is cached is no longer found."""
    spent: dict[str, float] = defaultdict(float)
    start, cpu = time.perf_counter(), _cpu_seconds(judge)
    for result in judge.run(plan, items):
        for name, value in result.seconds.items():
            spent[name] += value
    count = len(items)
    each = (time.perf_counter() - start) / count
    return each, (_cpu_seconds(judge) - cpu) / count, {name: 1000 * value / count for name, value in spent.items()}


def _steps(plan: Plan, items: Sequence[Item]) -> dict[Item, tuple[int, int, int]]:
    """Replays, eager steps and layer-steps per case-run of each item, counted in a worker's results: all of them are
    evaluated. A layer-step is one layer of one step.
    """
    from attn_testkit.runner_modes.messages import RunCase

    from attn_testkit.cases.case import parse_case
    from attn_testkit.contract import Execution
    from attn_testkit.environment import resolve
    from attn_testkit.running.processes.worker_process import Worker

    resolve(plan.device).prepare_process()
    counts: dict[Item, tuple[int, int, int]] = {}
    with contextlib.closing(Worker(plan.candidates[0], plan.device, timeout_s=300.0)) as worker:
        for item in items:
            records = worker.drive(RunCase(item.case, Execution(item.execution))).records
            replays = sum(record.replay for record in records)
            counts[item] = replays, len(records) - replays, len(records) * parse_case(item.case).layers.count
    return counts


@contextlib.contextmanager
def _memory(judge: Judge) -> Iterator[dict[str, float]]:
    """The most that the processes of a judge hold while the block runs, in 10^6 bytes; empty in this process."""
    most: dict[str, float] = {}
    pid = _pid(judge)
    ended = threading.Event()

    def look() -> None:
        while pid is not None and not ended.wait(_SAMPLED_EVERY):
            sizes = {"judge": _size(pid), "workers": sum(map(_size, _family(pid) - {pid}))}
            most.update({name: max(most.get(name, 0.0), size) for name, size in sizes.items()})

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def _pid(judge: Judge) -> int | None:
    """Process id of the judge; None for this process."""
    process = getattr(judge, "_process", None)
    return None if process is None else process.pid


def _stat(pid: int | str) -> list[str]:
    """Fields after the name in /proc/PID/stat; zeros if there is no such file."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["0"] * 50


def _family(pid: int) -> set[int]:
    """A process and all that descends from it."""
    parents = {int(entry.name): int(_stat(entry.name)[1]) for entry in Path("/proc").glob("[0-9]*")}
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _cpu_seconds(judge: Judge) -> float:
    """CPU time of the processes of a judge that live; 0 without Linux."""
    pid = _pid(judge)
    if pid is None:
        return time.process_time()
    return sum(int(ticks) for each in _family(pid) for ticks in _stat(each)[11:13]) / os.sysconf("SC_CLK_TCK")


def _size(pid: int) -> float:
    """Proportional set size, in 10^6 bytes; 0 without Linux."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def _print(console: Console, record: Record) -> None:
    versions = [f"{name} {record.versions[name]}" for name in ("kit", "torch", "triton") if name in record.versions]
    console.print(", ".join((*record.machine.values(), *versions)))
    table = Table("backend", "mode", "execution", "runs/s", "ms each", "CPU ms", "replays/s", "eager steps/s",
                  "layer-steps/s", *PHASES)  # fmt: skip
    for row in record.rows:
        cells = [f"{row.phases_ms.get(phase, 0.0):.2f}" for phase in PHASES]
        rates = [f"{1000 / row.case_run_ms:.1f}", f"{row.case_run_ms:.1f}", f"{row.cpu_ms:.1f}"]
        rates += [
            f"{rate:.0f}" if rate else "" for rate in (row.replays_per_s, row.eager_steps_per_s, row.layer_steps_per_s)
        ]
        table.add_row(row.backend, row.mode, row.execution, *rates, *cells)
    console.print(table)
    for name, value in record.start_s.items():
        console.print(f"{name}: {value:.2f} s")
    for name, value in record.memory_mb.items():
        console.print(f"{name}: {value:.0f} MB at most")


def _print_parts(console: Console, sampler: Sampler, judge: Judge, plan: Plan, item: Item, seconds: float) -> None:
    """All of the CPU time, by step and by room."""
    count, cpu, end = 0, time.process_time(), time.perf_counter() + seconds
    with sampler.sampling():
        while not count or time.perf_counter() < end:
            _results(judge, plan, item, _AT_ONCE)
            count += _AT_ONCE
    each = 1000 * (time.process_time() - cpu) / count
    console.print(f"{item.backend} {item.mode} {item.execution}: {each:.1f} ms of CPU time")
    for step, part, rooms in sampler.parts():
        said = ", ".join(f"{room} {each * spent:.2f}" for room, spent in rooms.items() if spent >= 0.01)
        console.print(f"  {part:4.0%}  {each * part:6.2f} ms  {step}" + (f": {said}" if said else ""))


def _print_profile(console: Console, judge: Judge, plan: Plan, item: Item) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(_results, judge, plan, item, _AT_ONCE)
    stats = pstats.Stats(profiler)
    console.print(f"{item.backend} {item.mode} {item.execution}: what takes a tenth of the time or more")
    for name, part in tenths(_by_function(stats.stats), stats.total_tt):
        console.print(f"  {part:4.0%}  {name}")


def _by_function(stats: Mapping[tuple[str, int, str], tuple[int, int, float, float, object]]) -> dict[str, float]:
    """Seconds inside each function of the kit, with all that it calls; only their own seconds for others."""
    spent: dict[str, float] = {}
    for (file, line, function), (_, _, own, inside, _) in stats.items():
        of_kit = next((part for part in _KIT if part in file), None)
        if of_kit is None:
            spent[f"{function}, by itself"] = spent.get(f"{function}, by itself", 0.0) + own
        else:
            spent[f"{function} ({of_kit[1:]}{file.rpartition(of_kit)[2]}:{line})"] = inside
    return spent


def _print_comparison(console: Console, now: Record, before: Record) -> None:
    figures = compared(now, before)
    for line in changed_versions(now, before):
        console.print(line)
    table = Table("", "before", "now", "now / before")
    for name, was, is_ in figures:
        table.add_row(name, f"{was:.1f}", f"{is_:.1f}", f"{is_ / was:.2f}" if was else "")
    console.print(table)


if __name__ == "__main__":
    main()
