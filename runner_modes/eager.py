"""One eager step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from attn_testkit.checks.observation import Observation, RanBefore
from attn_testkit.contract import ForwardBatch
from attn_testkit.environment import keep_device_busy
from attn_testkit.model import Trace
from attn_testkit.steps.schedule import Schedule, Step
from attn_testkit.watches.packing import Sent
from attn_testkit.watches.past_modes import past_modes

from .batches import batch_on_device, eager_batch
from .clock import Clock
from .dummy_prompts import capture_pieces
from .errors import blame
from .forward import forward, pieces_for
from .harness import ServerHarness, StagedStep, mode_of, what_alternates
from .hook_answers import verify_mask_of
from .looked_at import looked_at
from .mode_runners import MODE_RUNNERS
from .observe import observe, readable
from .overlap_scheduling import device_catches_up, next_of, plans_ahead, table_writes
from .tensors.states import commit_states


def run_eager(
    harness: ServerHarness,
    schedule: Schedule,
    step: Step,
    clock: Clock,
    *,
    pattern: str | None = None,
    label: str = "",
    ran_before: RanBefore = "",
    between: Callable[[], None] | None = None,
) -> Observation:
    """Run one eager step: plan, forward, read back. Memory in which the output may be allocated is poisoned first.

    ``pattern``: numbers other than the case's. ``label``: name of the step in messages. ``ran_before``: other work on
    the instance. ``between``: work of another instance after the plan and after each layer.

    Raises ``RunError`` for whatever the backend raises.
    """
    with harness.memory.step():
        with clock.phase("capture"):
            capture_pieces(harness, schedule)
        return _observed(harness, schedule, step, clock, pattern, label, ran_before, between)


def _observed(
    harness: ServerHarness,
    schedule: Schedule,
    step: Step,
    clock: Clock,
    pattern: str | None,
    label: str,
    ran_before: RanBefore,
    between: Callable[[], None] | None,
) -> Observation:
    driver = MODE_RUNNERS[schedule.case.mode]
    staged, sent, trace = _ran(harness, schedule, step, clock, pattern, label, between)
    with clock.phase("read back"), blame("read back", label):
        given = (*sent, staged.table)
        return observe(
            harness, driver, staged, readable(harness.model, trace), given, label=label, ran_before=ran_before
        )


def _ran(
    harness: ServerHarness,
    schedule: Schedule,
    step: Step,
    clock: Clock,
    pattern: str | None,
    label: str,
    between: Callable[[], None] | None,
) -> tuple[StagedStep, tuple[Sent, ...], Trace]:
    """Run a step, after the steps that it continues. Returns the inputs, and what the model computed."""
    if step.follows is not None:
        _ran(harness, schedule, step.follows, clock, pattern, f"{label}, a step before it", None)
    case, driver = schedule.case, MODE_RUNNERS[schedule.case.mode]
    with clock.phase("setup"):
        # Servers read it in every mode.
        verify_mask_of(harness)
        staged = harness.load(schedule, step, pattern)
        batch, sent = batch_of(harness, staged)
        ahead = next_of(staged, pattern) if plans_ahead(staged) else None
        server_writes = table_writes(harness, staged)
        pieces = pieces_for(harness, case, step)
        _poison_heap(harness, len(batch.input_ids))
        if ahead is not None:
            torch.cuda.synchronize()
        harness.begin_to_move(staged)
        done_ahead = keep_device_busy(ahead is not None)
    with clock.phase("eager"), harness.memory.peak("eager"):
        declared = harness.capabilities
        no_waits = not declared.needs.cpu_seq_lens and declared.server.eager_without_waits
        looked_at(harness, "plan", label, no_waits, partial(harness.backend.init_forward_metadata, batch))
        if between is not None:
            between()
        none_kv = step.stored and harness.capabilities.server.takes_none_kv
        run = partial(forward, harness, driver, batch, case, not step.stored, between, step.other_strides, pieces)
        with server_writes():
            trace = looked_at(harness, "forward without k and v" if none_kv else "forward", label, no_waits, run)
        harness.move_in_flight(staged)
        if ahead is not None:
            # A server commits the states of a draft before it plans the next step.
            commit_states(harness, staged, batch.state, step.bs)
            # Made only now: it fills a mask buffer of the backend.
            following, _ = batch_of(harness, ahead)
            device_catches_up(harness, done_ahead)
            plan = partial(harness.backend.init_forward_metadata, following)
            looked_at(harness, "plan of the next step", label, no_waits, plan)
            done_ahead()
        with blame("forward", label):
            torch.cuda.synchronize()
        if ahead is None:
            commit_states(harness, staged, batch.state, step.bs)
    return staged, sent, trace


def eager_by_turns(
    harness: ServerHarness, steps: Sequence[tuple[Schedule, Step]], clock: Clock, turns: Sequence[str]
) -> list[Observation]:
    """Run a step of each of several modes on one instance, once per entry of ``turns``. Each step is planned again for
    the lengths of its mode's last plan, with other modes' plans in between (TensorRT-LLM #13696). Several widths of one
    mode are run in the same way. ``turns``: their names in messages. Raises ``RunError`` for whatever the backend
    raises.
    """
    before = what_alternates(harness)
    return [
        run_eager(
            harness, schedule, step, clock, label=f"eager {mode_of(harness, schedule)}, {turn}", ran_before=before
        )
        for turn in turns
        for schedule, step in steps
    ]


def batch_of(harness: ServerHarness, staged: StagedStep) -> tuple[ForwardBatch, tuple[Sent, ...]]:
    """Make the batch that the backend gets, and the memory that it may not write. Raises ``RunError``."""
    mode = staged.schedule.case.mode
    driver = MODE_RUNNERS[mode]
    spec, extends = driver.eager_spec(harness, staged), driver.eager_extends(harness, staged)
    with past_modes():
        on_host = eager_batch(harness, staged, mode, spec, extends)
    return batch_on_device(on_host, harness.device)


def _poison_heap(harness: ServerHarness, rows: int) -> None:
    """Fill freed blocks of the output's size with NaN, so that an unwritten output row is detected."""
    heads = dict.fromkeys((layer.tp_q_head_num, layer.v_head_dim) for layer in harness.context.layers)
    dtypes = harness.context.dtype, torch.float32
    sizes = [rows * count * dim * dtype.itemsize for count, dim in heads for dtype in dtypes]
    if harness.context.kv_splits:
        sizes += [rows * count * torch.float32.itemsize for count, _ in heads]
    _ = [torch.full((size,), harness.fill, dtype=torch.uint8, device=harness.device) for size in sizes]
