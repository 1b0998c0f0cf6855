"""Planning the next step while the device is still busy with this one, as servers with overlap scheduling do.

SGLang's and vLLM's schedulers plan step n + 1 once they have the results of step n - 1. So the device may not have
begun step n, nor even the copies of its plan: a backend that refills the source buffer of these copies gives step n the
next step's values (TensorRT-LLM #15546, rtp-llm #1192).

The scheduler's stream does not wait for the model's either: if only plans read the request table, it writes the rows of
the next step as soon as a plan is made (SGLang #31270).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from attn_testkit.environment import server_stream
from attn_testkit.families.by_layer import make_data
from attn_testkit.steps.schedule import part
from attn_testkit.watches.past_modes import past_modes

from .harness import ServerHarness, StagedStep


def plans_ahead(staged: StagedStep) -> bool:
    """True if another step is planned after this one, before anything waits for the device."""
    return "overlap_scheduling" in staged.schedule.case.variants and bool(staged.step.requests)


def device_catches_up(harness: ServerHarness, done_ahead: Callable[[], None]) -> None:
    """Let the device finish its work before the next step is planned, if diagnosis asks for it. ``done_ahead``: ends
    ``keep_device_busy``."""
    if harness.waits_before_plans:
        done_ahead()
        torch.cuda.synchronize()


def next_of(staged: StagedStep, pattern: str | None = None) -> StagedStep:
    """A step that may be planned with the memory of ``staged`` in place: its requests without the first, in reverse.

    A single request is repeated, as after a step in which nothing was accepted.
    """
    step = staged.step
    other = part(step, range(step.bs - 1, min(0, step.bs - 2), -1))
    with past_modes():
        data = make_data(staged.schedule, other, pattern)
    return replace(staged, step=other, data=data, tokens=None)


def table_writes(harness: ServerHarness, staged: StagedStep) -> Callable[[], AbstractContextManager[None]]:
    """Prepare the server's writes to the request table. Call the returned function after the plan: around the forward
    or the replay, the step's rows lead to slot 0, which is poison.

    Nothing is written for a backend whose forwards may read the table, or if no step is planned ahead. Raises the
    emulation's error for a table that is still read.
    """
    if not (harness.capabilities.server.takes_rewritten_table and plans_ahead(staged)):
        return nullcontext
    table = harness.request_tables
    rows = torch.tensor([request.pool_row for request in staged.step.requests], device=table.device)
    return partial(_rewritten, table, rows, table.index_select(1, rows))


@contextmanager
def _rewritten(table: torch.Tensor, rows: torch.Tensor, numbers: torch.Tensor) -> Iterator[None]:
    # A device begins with the forward when the table is written; the rows come back when the forward is done.
    stream = server_stream(partial(table.index_fill_, 1, rows, 0))
    yield
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        table.index_copy_(1, rows, numbers)
    torch.cuda.current_stream().wait_stream(stream)
