"""Comparison of each fake of a vendor kernel with the kernel: both on the same inputs, on one GPU.

    python -m attn_testkit.backends.vendor.warmup --backend flashinfer
    python ci/vendor_agreement.py --backend flashinfer --tier core

For every case of a tier the real kernel and its fake run the same steps, eager and under graphs with every replay
of the schedule. Their results may differ by at most the computed limit of the oracle. A table shows, for each entry
point, the largest part of the limit: of the difference, and of each of the two compared with the oracle.

Without a GPU there is no kernel: ``--device cpu`` compares the fake with itself, which only tests this script.

    python ci/vendor_agreement.py --refusals

tries every refusal of every fake on the kernel instead, and the arguments from which it starts: a table says where the
kernel agrees, where it accepts, and where it refuses with another text. A kernel that is not installed is left out.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import click
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.errors import RunError
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness

from attn_testkit.backends.vendor import VendorMissing, forced, sm_of
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation
from attn_testkit.contract import AttentionBackend, Execution, ForwardMode
from attn_testkit.environment import Environment, resolve
from attn_testkit.families.expected import expect
from attn_testkit.registry import load_backend
from attn_testkit.running.case_runs.case_run import gradients_off, schedule_for
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.request import Item, Request
from attn_testkit.steps.schedule import Schedule
from attn_testkit_servers.fakes.all_refusals import all_refusals
from attn_testkit_servers.fakes.refusals import Check, Refusals


def _flashinfer(case: Case) -> str:
    if case.mode is ForwardMode.DECODE:
        tensor_cores = case.heads.q_heads // case.heads.kv_heads >= 4 or case.kv_dtype != "same"
        return "BatchDecodeWithPagedKVCacheWrapper" + (", tensor cores" if tensor_cores else "")
    masked = ", custom mask" if case.mode is ForwardMode.TARGET_VERIFY else ", causal"
    return "BatchPrefillWithPagedKVCacheWrapper" + masked


def _mla(kernel: str) -> Callable[[Case], str]:
    def name(case: Case) -> str:
        return f"BatchMLAPagedAttentionWrapper, {kernel}, {'one row' if case.mode.is_decode() else 'causal'}"

    return name


def _trtllm_mha(case: Case) -> str:
    if case.mode.is_ragged():
        return "trtllm_batch_context_with_kv_cache"
    rows = "one row" if case.width == 1 else "packed causal mask"
    keys = ", e4m3 keys" if case.kv_dtype != "same" else ""
    return f"trtllm_batch_decode_with_kv_cache, {rows}{keys}"


ENTRY_POINTS: dict[str, Callable[[Case], str]] = {
    "flashinfer": _flashinfer,
    "flashinfer_ragged": lambda case: "ragged wrapper, paged prefix, merge_state",
    "flashinfer_mla": _mla("fa2"),
    "flashinfer_mla_fa3": _mla("fa3"),
    "flashinfer_mla_fp8": _mla("fa3, e4m3 keys"),
    "trtllm_mha": _trtllm_mha,
}
"""Backend -> entry point that a case of it runs. A backend without an entry is named by its mode."""


@dataclass
class Tally:
    """Results of one entry point, as parts of the limit; above 1 is too much."""

    cases: int = 0
    steps: int = 0
    difference: float = 0.0
    real: float = 0.0
    fake: float = 0.0
    worst: str = ""
    failures: list[str] = field(default_factory=list)

    def add(self, case: str, found: list[tuple[float, float, float]]) -> None:
        """Count one case; ``found``: (difference, real, fake) of every step."""
        self.cases += 1
        self.steps += len(found)
        for difference, real, fake in found:
            if difference > self.difference:
                self.difference, self.worst = difference, case
            self.real, self.fake = max(self.real, real), max(self.fake, fake)
        if max(step[0] for step in found) > 1:
            self.failures.append(case)


_Seen = list[tuple[Schedule, Observation]]


def _steps(backend: type[AttentionBackend], item: Item, environment: Environment, kind: Any) -> _Seen:
    """Run one case on the real kernel or on its fake."""
    schedule = schedule_for(parse_case(item.case), backend.capabilities)
    with environment.active(), gradients_off(schedule.case), forced(kind) if kind else nullcontext():
        harness = ServerHarness(backend, [schedule], environment.device)
        if item.execution == Execution.GRAPH:
            return list(run_graphs(harness, [schedule], Clock()).observed)
        return [(schedule, run_eager(harness, schedule, schedule.steps[0], Clock()))]


def _compared(first: _Seen, second: _Seen) -> Iterator[tuple[float, float, float]]:
    for (schedule, real), (_, fake) in zip(first, second, strict=True):
        expected = expect(schedule, real.step)
        one, other = Comparison(real, expected), Comparison(fake, expected)
        apart = (one.out.double() - other.out.double()).abs()
        part = (apart / expected.attention_limit).nan_to_num(torch.inf, torch.inf)
        yield float(part.max()), one.margin, other.margin


def _compare(item: Item, environment: Environment) -> list[tuple[float, float, float]]:
    backend = load_backend(item.backend)
    kind = None if environment.emulated else "real"
    real = _steps(backend, item, environment, kind)
    return list(_compared(real, _steps(backend, item, environment, "fake")))


def _cause(error: BaseException) -> BaseException:
    return error.__cause__ if isinstance(error, RunError) and error.__cause__ is not None else error


def _report(tallies: dict[str, Tally]) -> None:
    click.echo(f"\n{'entry point':<62} {'cases':>5} {'steps':>5} {'apart':>6} {'kernel':>6} {'fake':>8}  worst case")
    for name, tally in tallies.items():
        click.echo(
            f"{name:<62} {tally.cases:>5} {tally.steps:>5} {tally.difference:>6.3f} {tally.real:>6.3f} "
            f"{tally.fake:>8.3f}  {tally.worst}"
        )


@dataclass
class Agreement:
    """Results of all comparisons."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    broken: int = 0
    left: int = 0
    """Number of case-runs for which there was no time."""

    @property
    def apart(self) -> int:
        """Number of case-runs in which kernel and fake differ by more than the limit."""
        return sum(len(tally.failures) for tally in self.tallies.values())

    @property
    def worst(self) -> float:
        """Largest difference, as a part of the limit."""
        return max((tally.difference for tally in self.tallies.values()), default=0.0)

    def one(self, item: Item, environment: Environment) -> None:
        """Compare a case-run. Differences are printed at once, so that a run that is cut short has printed them."""
        name = f"{item.backend}: {ENTRY_POINTS.get(item.backend, lambda case: str(case.mode))(parse_case(item.case))}"
        run = f"{item.execution} {item.case}"
        try:
            found = _compare(item, environment)
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, VendorMissing):
                raise cause from error
            self.broken += 1
            click.echo(f"{item.backend} {run}: {type(cause).__name__}: {cause}")
            return
        self.tallies.setdefault(name, Tally()).add(run, found)
        apart = max(step[0] for step in found)
        if apart > 1:
            click.echo(f"apart by {apart:.3g} of the limit: {name}: {run}")


def _compare_all(items: tuple[Item, ...], environment: Environment, seconds: float | None) -> Agreement:
    done, start, absent = Agreement(), time.perf_counter(), set()
    for count, item in enumerate(items, 1):
        spent = time.perf_counter() - start
        if seconds is not None and spent > seconds:
            done.left = len(items) - count + 1
            break
        if item.backend not in absent:
            try:
                done.one(item, environment)
            except VendorMissing as missing:
                absent.add(item.backend)
                click.echo(f"{item.backend}: {missing}")
        if count % 25 == 0:
            click.echo(f"[{count}/{len(items)}, {spent:.0f} s, at most {done.worst:.3f} apart]")
    return done


AGREES, ACCEPTS, OTHER, LEFT = "agrees", "kernel accepts", "kernel refuses other", "not compared"
_ROW = "row of refusals: "
_SECONDS_A_ROW = 300
"""A first call may compile."""
_SAME = 0.02
"""Largest difference of outputs of fake and kernel, which are of the order of 1."""


@dataclass(frozen=True)
class Row:
    """Result of one refusal, or of the arguments from which the refusals of an entry point start."""

    entry: str
    tried: str
    outcome: str
    said: str = ""


def _tried(each: Refusals, check: Check | None, environment: Environment) -> Row:
    tried = "(accepted arguments)" if check is None else check.tried
    if not environment.emulated and not each.sm[0] <= sm_of(environment.device) <= each.sm[1]:
        return Row(each.entry, tried, LEFT, f"the kernel needs SM{each.sm[0]} to SM{each.sm[1]}")
    try:
        kernel = each.fake if environment.emulated else each.real()
    except ImportError as error:
        return Row(each.entry, tried, LEFT, str(error))
    try:
        given = each.accepted(environment.device, kernel)
        changed = given if check is None else given | check.change(given)
    except Exception as error:
        return Row(each.entry, tried, OTHER, f"its arguments cannot be made: {type(error).__name__}: {error}")
    try:
        returned = each.call(kernel, each.function, changed)
        if not environment.emulated:
            torch.cuda.synchronize()
    except Exception as error:
        said = " ".join(str(error).split())
        agrees = check is not None and " ".join(check.text.split()) in said
        return Row(each.entry, tried, AGREES if agrees else OTHER, f"{type(error).__name__}: {said}")
    if check is not None:
        return Row(each.entry, tried, ACCEPTS)
    found = each.output(returned)
    if found is None:
        return Row(each.entry, tried, AGREES)
    faked = each.output(each.call(each.fake, each.function, each.accepted(environment.device, each.fake)))
    assert faked is not None
    apart = float((found.float() - faked.float()).abs().max())
    return Row(each.entry, tried, AGREES if apart <= _SAME else OTHER, f"outputs differ by {apart:.3g}")


def _all_tried() -> list[tuple[Refusals, Check | None]]:
    return [(each, check) for each in all_refusals() for check in (None, *each.checks)]


def _try_from(first: int, environment: Environment) -> None:
    """Print a row for every refusal from ``first`` on, each as soon as it is known."""
    with environment.active(), torch.no_grad():
        for index, (each, check) in enumerate(_all_tried()[first:], first):
            row = _tried(each, check, environment)
            print(_ROW + json.dumps([index, row.entry, row.tried, row.outcome, row.said]), flush=True)
            if not environment.emulated and "CUDA error" in row.said:
                return  # nothing else runs in this process


def _rows(device: str) -> Iterator[Row]:
    """A row for every refusal. A process that dies, hangs or loses its device costs one."""
    todo = _all_tried()
    first = 0
    while first < len(todo):
        command = [sys.executable, __file__, "--refusals", "--device", device, "--first", str(first)]
        lines: queue.Queue[str | None] = queue.Queue()
        died = "the process died"
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
            reader.start()
            try:
                while (line := lines.get(timeout=_SECONDS_A_ROW)) is not None:
                    # Compiled code may print, too, and leave its line open.
                    _, marked, row = line.partition(_ROW)
                    if marked:
                        index, *told = json.loads(row)
                        yield Row(*told)
                        # A process that lost its device ends by itself after it has reported.
                        first, died = index + 1, "" if "CUDA error" in told[-1] else died
            except queue.Empty:
                died = f"nothing for {_SECONDS_A_ROW} s"
            process.kill()
            reader.join()
        if died and first < len(todo):
            each, check = todo[first]
            yield Row(each.entry, "(accepted arguments)" if check is None else check.tried, OTHER, died)
            first += 1


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _refusals(device: str) -> int:
    """Print the table; the exit code."""
    counts: dict[str, int] = {}
    left: dict[str, str] = {}
    for row in _rows(device):
        counts[row.outcome] = counts.get(row.outcome, 0) + 1
        if row.outcome == LEFT:
            left[row.entry] = row.said
        else:
            click.echo(f"{row.entry:<44} {row.tried:<44} {row.outcome:<20} {row.said[:160]}")
    for entry, why in left.items():
        click.echo(f"{entry}: not compared: {why}")
    click.echo(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if set(counts) & {ACCEPTS, OTHER} else 0 if AGREES in counts else 5


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, help=__doc__)
@click.option("--backend", "-b", "backends", multiple=True, metavar="SPEC", help="Default: every vendor backend.")
@click.option("--tier", default="core", show_default=True)
@click.option("--device", default="auto", show_default=True, metavar="auto|cuda|cpu")
@click.option("--mode", "modes", multiple=True)
@click.option("--execution", "executions", multiple=True)
@click.option("--case", "cases", multiple=True, metavar="GLOB")
@click.option("--seconds", type=float, help="Time limit; the run fails if something was not compared.")
@click.option("--refusals", is_flag=True, help="Try the refusals of every fake on its kernel, and nothing else.")
@click.option("--first", type=int, hidden=True, help="With --refusals: try from this one on, in this process.")
@click.pass_context
def main(
    context: click.Context,
    backends: tuple[str, ...],
    tier: str,
    device: str,
    modes: tuple[str, ...],
    executions: tuple[str, ...],
    cases: tuple[str, ...],
    seconds: float | None,
    refusals: bool,
    first: int | None,
) -> None:
    backends = backends or tuple(ENTRY_POINTS)
    environment = resolve(device)
    environment.prepare_process()
    if first is not None:
        _try_from(first, environment)
        return
    if refusals:
        context.exit(_refusals(device))
    request = Request(backends, tuple(modes), tuple(executions), tier, device, cases=tuple(cases))
    plan = plan_run(request, lambda candidate: load_backend(candidate.spec).capabilities)
    click.echo(f"{plan.header.device_name}, {dict(plan.header.versions)}, {len(plan.items)} case-runs")
    for row in plan.preset:
        click.echo(f"{row.backend} {row.mode} {row.execution}: {row.status}: {row.reason}")
    done = _compare_all(plan.items, environment, seconds)
    _report(done.tallies)
    what = "kernel and fake"
    if environment.emulated:
        what = "the fake with itself: nothing is shown about a kernel"
    click.echo(f"\ncompared {what}: {done.apart} apart, {done.broken} broken, {done.left} not compared")
    context.exit(1 if done.apart or done.broken or done.left else 0 if done.tallies else 5)


if __name__ == "__main__":
    main()
