"""Test that one wrong key of very many is found and named: left out, counted twice, or of another request.

    python ci/ledger.py --device cuda                            # keys 66,000 and 262,144, on a GPU
    python ci/ledger.py --device cpu -b torch_native -b triton   # keys 4,096, kernels in Triton's interpreter

Every backend decodes a batch of codes (``steps/patterns.py``) whose first request is long: unchanged, and then with one
value of that request changed in the KV pool while the kernel runs, and restored. Zeros act like a key that is left out,
twice its code like one that is counted twice, and another request's code like one that is read from the wrong place. So
real kernels are tried, at random places and on both sides of possible starts of splits. A table gives, per backend and
dtype, the largest distance of healthy counts from 1, how many wrong ones ``keys-counted-once`` found, and how many it
named correctly; the limit is half a key. An interrupted run (Ctrl-C, SIGTERM) prints a row of what was tried.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.errors import RunError
from attn_testkit.runner_modes.harness import ServerHarness

from attn_testkit.cases.case import Case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.checks import Comparison
from attn_testkit.checks.counted_once import miscounts_text
from attn_testkit.checks.key_counts import HALF_A_KEY, codes_of, in_keys
from attn_testkit.checks.miscounts import find_miscounts
from attn_testkit.contract import AttentionBackend, Capabilities, ForwardMode
from attn_testkit.environment import missing_here, resolve
from attn_testkit.families.expected import expect
from attn_testkit.registry import load_backend
from attn_testkit.running.case_runs.case_run import gradients_off, schedule_for
from attn_testkit.steps.schedule import Schedule

BACKENDS = (
    "torch_native", "triton", "flashinfer", "flashinfer_mla", "flashinfer_mla_fa3", "flashinfer_mla_fp8", "trtllm_mha",
    "trtllm_mla", "tokenspeed_mla",
)  # fmt: skip
CPU_LENGTHS, GPU_LENGTHS = (4096,), (66_000, 262_144)
_DTYPES = ("bf16", "fp16")
_POOLS = ("same", "fp8_e4m3")
_BESIDE = (300, 33)
"""Number of keys of the other requests."""
_TELL_EVERY = 20.0
"""Seconds between lines of progress."""


@dataclass(frozen=True)
class Change:
    """A change of one key of request 0."""

    kind: str
    """One of ``left out``, ``twice`` and ``another's``."""
    key: int
    other: int = 0
    """A key of request 1, for ``another's``."""

    @property
    def said(self) -> str:
        """The text that names it correctly."""
        return {
            "left out": f"KV token {self.key} was left out",
            "twice": f"KV token {self.key} was counted twice",
            "another's": f"KV token {self.other} of request 1 was read instead of KV token {self.key}",
        }[self.kind]


class Changed:
    """A backend whose values are changed in the pool while it runs. Everything else is unchanged."""

    def __init__(self, backend: AttentionBackend, slot: int, change: Change, other_slot: int) -> None:
        self._backend, self._slot, self._change, self._other = backend, slot, change, other_slot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
        values = self._backend.context.kv_pool.get_value_buffer(layer.layer_id)
        before = _row(values, self._slot)
        new = {"left out": 0.0 * before, "twice": 2.0 * before, "another's": _row(values, self._other)}
        _put(values, self._slot, new[self._change.kind])
        out = self._backend.forward(q, k, v, layer, batch, save_kv_cache)
        _put(values, self._slot, before)
        return out


def _row(values: torch.Tensor, slot: int) -> torch.Tensor:
    return values[slot : slot + 1].float().clone()


def _put(values: torch.Tensor, slot: int, row: torch.Tensor) -> None:
    """Store a row as bytes, since torch cannot copy FP8 on every device."""
    row = row.to(values.dtype)
    if values.dtype.itemsize == 1:
        values, row = values.view(torch.uint8), row.view(torch.uint8)
    values[slot : slot + 1] = row


@dataclass
class Tally:
    """One row of the table."""

    tried: int = 0
    found: int = 0
    named: int = 0
    healthy: float = 0.0
    """Largest error of any healthy count."""
    least: float = float("inf")
    """Smallest error of a wrong count, each in the head and layer in which it is largest."""


def _cases(declared: Capabilities, length: int, dtypes: frozenset[str], pools: frozenset[str]) -> Iterator[Case]:
    """Decode cases of this many keys, in every one of these dtypes of the model and of the pool."""
    whole = declared.with_changes(bounds={"max_context_len": max(declared.bounds.max_context_len, length + 4096)})
    (first, *_) = [case for case in generate(whole, ForwardMode.DECODE, "core") if case.data == "plus_minus_one"]
    plain = first.of_requests((length - 1, *_BESIDE), layout="shuffled")
    for dtype in sorted(declared.precision.dtypes & dtypes):
        for kv_dtype in sorted(declared.kv_pool.kv_dtypes & pools, reverse=True):
            yield replace(plain, dtype=dtype, kv_dtype=kv_dtype)


def _changes(length: int, places: int, edges: int, seed: int) -> Iterator[Change]:
    """Changes at random places, at both ends, and on both sides of at most ``edges`` multiples of 256."""
    rng = np.random.default_rng(seed)
    every = max(256, -(-length // edges // 256) * 256)
    sides = [key for edge in range(every, length - 1, every) for key in (edge - 1, edge)]
    for key in [*rng.integers(0, length - 1, places).tolist(), 0, length - 2, *sides]:
        for kind in ("left out", "twice", "another's"):
            yield Change(kind, key, int(rng.integers(0, _BESIDE[0])))


def _off(comparison: Comparison) -> float:
    """Largest error of any count of any row and head."""
    error, lens = in_keys(comparison.out, comparison.expected), comparison.observed.step.lens
    group, most = error.shape[2] // comparison.expected.data.stored_keys.shape[3], 0.0
    for layer in range(len(error)):
        for head in range(error.shape[2]):
            codes = codes_of(comparison.expected.data, lens, layer, head // group)
            rows = error[layer, :, head].nan_to_num().float()
            most = max(most, float((rows @ codes.mT).abs().max()) / codes.shape[1])
    return most


def _try(harness: ServerHarness, schedule: Schedule, changes: list[Change], tally: Tally) -> None:
    step, backend = schedule.steps[0], harness.backend
    expected = expect(schedule, step)
    # Every try uses the same numbers: drawing 262,144 keys takes longer than everything else.
    loaded = harness.load(schedule, step)
    harness.load = lambda *_: loaded  # type: ignore[method-assign]

    def evaluated() -> Comparison:
        return Comparison(run_eager(harness, schedule, step, Clock()), expected)

    healthy = evaluated()
    if not healthy.right:
        click.echo(f"  {schedule.case.id}: not right as it is, {healthy.margin:.3g} times the limit")
    tally.healthy = max(tally.healthy, _off(healthy))
    slots, others = step.requests[0].slots, step.requests[1].slots
    reported = time.perf_counter()
    for change in changes:
        if time.perf_counter() - reported > _TELL_EVERY:
            reported = time.perf_counter()
            click.echo(f"  {tally.tried} of {len(changes)} wrong keys tried, {tally.named} named", err=True)
        harness.backend = Changed(backend, int(slots[change.key]), change, int(others[change.other]))  # type: ignore[assignment]
        wrong = evaluated()
        tally.tried += 1
        off = HALF_A_KEY * float(wrong.key_ratio[:, 0].amax())
        tally.least = min(tally.least, off)
        tally.found += off > HALF_A_KEY
        said = miscounts_text(find_miscounts(wrong, 0)) if not wrong.right else "nothing"
        tally.named += said == change.said
        if said != change.said:
            click.echo(f"  {change.said}: said was {said!r}")
    harness.backend = backend


def _say(name: str, case: Case, length: int, tally: Tally, seconds: float) -> None:
    """Print the row of the table."""
    pool = "same" if case.kv_dtype == "same" else "e4m3"
    click.echo(
        f"{name:<20} {case.dtype:<5} {pool:<5} {length:>7} {tally.healthy:>9.3f} {tally.least:>9.3f} "
        f"{tally.found:>6}/{tally.tried:<5} {tally.named:>6}/{tally.tried:<5} {seconds:>7.1f}"
    )


def _backend(
    name: str,
    lengths: tuple[int, ...],
    asked: tuple[frozenset[str], frozenset[str]],
    device: str,
    which: tuple[int, int, int],
) -> tuple[int, int]:
    """Return the numbers of keys that were tried, and not named. ``asked``: dtypes of the model and of the pool.
    ``which``: arguments of ``_changes`` after the length."""
    environment, loaded = resolve(device), load_backend(name)
    declared = loaded.capabilities
    absent = missing_here(declared, environment, ForwardMode.DECODE)
    if absent or ForwardMode.DECODE not in declared.eager:
        click.echo(f"{name:<20} not run here: {absent or 'decode is not declared'}")
        return 0, 0
    tried = bad = 0
    for length in lengths:
        for case in _cases(declared, length, *asked):
            schedule, started, tally = schedule_for(case, declared), time.perf_counter(), Tally()
            try:
                with environment.active(), gradients_off(case):
                    harness = ServerHarness(loaded, [schedule], environment.device)
                    harness.copies_pool = False
                    _try(harness, schedule, list(_changes(length, *which)), tally)
            except (RunError, ValueError) as error:
                cause = error.__cause__ or error
                click.echo(f"{name:<20} {case.dtype} {length}: {type(cause).__name__}: {cause}")
                bad += 1
                continue
            except KeyboardInterrupt:
                _say(name, case, length, tally, time.perf_counter() - started)
                raise
            _say(name, case, length, tally, time.perf_counter() - started)
            tried += tally.tried
            bad += tally.tried - tally.named + (tally.healthy >= HALF_A_KEY)
    return tried, bad


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, help=__doc__)
@click.option("--backend", "-b", "backends", multiple=True, metavar="SPEC", help="Default: all of the kit.")
@click.option("--device", default="auto", show_default=True, metavar="auto|cuda|cpu")
@click.option("--length", "lengths", multiple=True, type=click.IntRange(600), help="Keys of the long request.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(_DTYPES), help="Of the model; default: both.")
@click.option("--pool", "pools", multiple=True, type=click.Choice(_POOLS), help="Dtype of the KV pool; default: both.")
@click.option(
    "--places", default=50, show_default=True, type=click.IntRange(0), help="Random keys, in addition to edges."
)
@click.option("--edges", default=64, show_default=True, type=click.IntRange(1), help="The most edges of splits.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.pass_context
def main(
    context: click.Context,
    backends: tuple[str, ...],
    device: str,
    lengths: tuple[int, ...],
    dtypes: tuple[str, ...],
    pools: tuple[str, ...],
    places: int,
    edges: int,
    seed: int,
) -> None:
    environment = resolve(device)
    environment.prepare_process()
    lengths = lengths or (CPU_LENGTHS if environment.emulated else GPU_LENGTHS)
    click.echo(f"{environment.name}, torch {torch.__version__}; counts off by, and of wrong keys found and named")
    click.echo(f"{'backend':<20} {'dtype':<5} {'pool':<5} {'keys':>7} {'healthy':>9} {'wrong':>9} {'found':>12} "
               f"{'named':>12} {'seconds':>7}")  # fmt: skip
    asked, which = (frozenset(dtypes or _DTYPES), frozenset(pools or _POOLS)), (places, edges, seed)
    done = [_backend(name, lengths, asked, device, which) for name in backends or BACKENDS]
    tried, bad = (sum(each) for each in zip(*done, strict=True))
    click.echo(f"{tried} wrong keys tried; {bad} not named, or healthy counts off by half a key")
    context.exit(1 if bad else 0 if tried else 5)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
