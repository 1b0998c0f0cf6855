"""Planning the next step while the device is still busy with this one, as servers do that overlap the two.

SGLang's and vLLM's schedulers plan step n + 1 once they have the results of step n - 1. So the device may not have
begun with step n, and has not even made the copies of its plan: a backend that refills their source buffer gives step n
the next step's numbers (TensorRT-LLM #15546, rtp-llm #1192).
"""

from __future__ import annotations

from dataclasses import replace

from attn_testkit.families.table import family_of
from attn_testkit.steps.schedule import part
from attn_testkit.watches.past_modes import past_modes

from .harness import StagedStep

__all__ = ["next_of", "plans_ahead"]


def plans_ahead(staged: StagedStep) -> bool:
    """True if another step is planned after this one, before anything waits for the device."""
    return "overlap_scheduling" in staged.schedule.case.variants and bool(staged.step.requests)


def next_of(staged: StagedStep, pattern: str | None = None) -> StagedStep:
    """A step that may be planned with the memory of ``staged`` in place: its requests without the first, in reverse.

    A single request is repeated, as after a step in which nothing was accepted.
    """
    step = staged.step
    other = part(step, range(step.bs - 1, min(0, step.bs - 2), -1))
    with past_modes():
        data = family_of(staged.schedule.case).data(staged.schedule, other, pattern)
    return replace(staged, step=other, data=data, tokens=None)
