"""One eager step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from attn_testkit.cases.schedule import Schedule, Step
from attn_testkit.checks.observation import Among, Observation
from attn_testkit.contract import ForwardBatch
from attn_testkit.environment import keep_device_busy
from attn_testkit.watches.packing import Sent
from attn_testkit.watches.past_modes import past_modes

from .ahead import next_of, plans_ahead
from .batches import batch_on_device, eager_batch
from .clock import Clock
from .drivers import DRIVERS
from .errors import blame
from .forward import forward
from .harness import LoadedStep, ServerHarness
from .hook_answers import verify_mask_of
from .looked_at import looked_at
from .observe import observe, readable

__all__ = ["batch_of", "eager_by_turns", "run_eager"]


def run_eager(
    harness: ServerHarness,
    schedule: Schedule,
    step: Step,
    clock: Clock,
    *,
    pattern: str | None = None,
    label: str = "",
    among: Among = "",
    between: Callable[[], None] | None = None,
) -> Observation:
    """Run one eager step: plan, forward, read back. Memory that the output may get is poisoned first.

    ``pattern``: numbers other than the case's. ``label``: name of the step in messages. ``among``: other work on the
    instance. ``between``: work of another instance after the plan and after each layer.

    Raises ``DriveError`` for whatever the backend raises.
    """
    case, driver = schedule.case, DRIVERS[schedule.case.mode]
    with clock.phase("setup"):
        # Servers read it in every mode.
        verify_mask_of(harness)
        loaded = harness.load(schedule, step, pattern)
        batch, sent = batch_of(harness, loaded)
        ahead = next_of(loaded, pattern) if plans_ahead(loaded) else None
        _poison_heap(harness, len(batch.input_ids))
        if ahead is not None:
            torch.cuda.synchronize()
        done_ahead = keep_device_busy(ahead is not None)
    with clock.phase("eager"):
        claims = harness.capabilities
        no_waits = not claims.needs_cpu_seq_lens and claims.server.eager_without_waits
        looked_at(harness, "plan", label, no_waits, partial(harness.backend.init_forward_metadata, batch))
        if between is not None:
            between()
        none_kv = step.stored and harness.capabilities.server.takes_none_kv
        run = partial(forward, harness, driver, batch, case, not step.stored, between, step.turned)
        trace = looked_at(harness, "forward without k and v" if none_kv else "forward", label, no_waits, run)
        if ahead is not None:
            # Made only now: it fills a mask buffer of the backend.
            following, _ = batch_of(harness, ahead)
            plan = partial(harness.backend.init_forward_metadata, following)
            looked_at(harness, "plan of the next step", label, no_waits, plan)
            done_ahead()
        with blame("forward", label):
            torch.cuda.synchronize()
    with clock.phase("read back"), blame("read back", label):
        given = (*sent, loaded.table)
        return observe(harness, driver, loaded, readable(harness.model, trace), given, label=label, among=among)


def eager_by_turns(
    harness: ServerHarness, steps: Sequence[tuple[Schedule, Step]], clock: Clock, turns: Sequence[str]
) -> list[Observation]:
    """Run a step of each of several modes on one instance, all of them once per entry of ``turns``.

    Each is planned again for the lengths of its own last plan, with other modes' plans between (TensorRT-LLM #13696).
    ``turns``: their names in messages. Raises ``DriveError`` for whatever the backend raises.
    """
    return [
        run_eager(harness, schedule, step, clock, label=f"eager {schedule.case.mode}, {turn}", among="modes")
        for turn in turns
        for schedule, step in steps
    ]


def batch_of(harness: ServerHarness, loaded: LoadedStep) -> tuple[ForwardBatch, tuple[Sent, ...]]:
    """Make the batch that the backend gets, and the memory that it may not write. Raises ``DriveError``."""
    mode = loaded.schedule.case.mode
    driver = DRIVERS[mode]
    spec, extends = driver.eager_spec(harness, loaded), driver.eager_extends(harness, loaded)
    with past_modes():
        on_host = eager_batch(harness, loaded, mode, spec, extends)
    return batch_on_device(on_host, harness.device)


def _poison_heap(harness: ServerHarness, rows: int) -> None:
    """Fill freed blocks of the output's size with NaN, so that an unwritten output row shows."""
    heads = dict.fromkeys((layer.tp_q_head_num, layer.v_head_dim) for layer in harness.context.layers)
    dtypes = harness.context.dtype, torch.float32
    sizes = [rows * count * dim * dtype.itemsize for count, dim in heads for dtype in dtypes]
    if harness.context.kv_parts:
        sizes += [rows * count * torch.float32.itemsize for count, _ in heads]
    _ = [torch.full((size,), harness.fill, dtype=torch.uint8, device=harness.device) for size in sizes]
