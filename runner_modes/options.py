"""Options of a graph run: the defaults are for evaluation; other values find out why a replay is wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunOptions:
    """The settings of one graph run. Diagnosis changes the options on a fresh instance, one question per run."""

    pattern: str | None = None
    """Numbers other than the case's (``steps/patterns.py``, ``steps/foreign_slots.py``). Question: which KV tokens did
    a row attend to, and whose result does it hold?"""
    poison_allocated: bool = True
    """Poison memory that the backend allocated while a graph was captured, before every replay: a graph must write it
    before it reads it. False: diagnosis asks whether the replay is right if that memory keeps its contents."""
    watch_replaced: bool = False
    """Compare the backend's tensors before and after each plan for a replay. Question: which of them did it replace?"""
    copy_into_replaced: bool = False
    """Do the work of ``watch_replaced``, and keep each replaced tensor alive with its successor's numbers. Question: is
    the replay right then, so that the graph still reads the old one?"""
    restore_state: bool = False
    """Restore, before every plan for a replay, what the backend's tensors held before the first capture.
    Question: is the replay right then, so that a counter or a scratch buffer is not reset?"""
    restore_only: str = ""
    """Restore only the tensor of this attribute, with ``restore_state``."""
    width_at_capture: bool = False
    """Set ``num_tokens_per_req`` at capture even with ``takes_unset_width``. Question: is the graph right then?"""
    step_at_capture: bool = False
    """Capture with the inputs of the schedule's first step instead of a dummy batch. Question: is its replay right
    then, so that the graph keeps a value of its capture?"""
    most_programs: tuple[int, int] | None = None
    """Axis of a launch's grid, and the most programs that emulated Triton kernels have along it. Question: does the
    step pass then? If so, programs without a request spoil it."""
    contiguous_heads: bool = False
    """Make heads of new k and v contiguous even with ``takes_strided_heads``. Question: is the step right then?"""
    pools_anywhere: bool = False
    """Allocate pools as usual even if the case puts them across a multiple of 4 GiB. Question: is the step right
    then?"""
    uncut: bool = False
    """Run steps as one batch in a case that cuts them. Question: is the step right then?"""
    nothing_behind: bool = False
    """End the memory of q, k and v with the last row; otherwise rows of NaN follow. Question: is the step finite
    then?"""
    wait_before_plans: bool = False
    """Wait for the device before the next step is planned while a step is still queued (overlap scheduling). Question:
    is the step right then, so that this plan overwrites memory that the queued step still reads?"""
    programs_in_order: bool = False
    """Run programs of a Triton kernel in the order of their numbers, and side streams at once, as in eager runs.
    Question, where the device is emulated: is the graph right then, so that the result depends on the order?"""
    eager_steps: bool = True
    """Run eager steps on the same instance, before there are graphs and between replays. Question if False: are replays
    right if nothing else uses the instance?"""
