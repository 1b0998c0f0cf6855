"""The check that new lengths do not make a backend compile again: more eager steps on the instance of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from attn_testkit.graphs.compilers import compilations, forget_compiled, recompiling_allowed, room_left
from attn_testkit.results.finding import Finding
from attn_testkit.steps.schedule import Schedule, Step

from .clock import Clock
from .eager import run_eager
from .errors import RunError
from .harness import ServerHarness

STEPS = 5
"""Number of steps with other lengths. torch.compile makes a size dynamic after two sizes, perhaps separately for those
that a tile divides: if it still compiles in the fifth step, it always does."""


def compiles_once(harness: ServerHarness, schedule: Schedule, clock: Clock) -> list[Finding]:
    """Find out if each of ``STEPS`` eager steps that differ only in lengths compiles or tunes something.

    Nothing is run if the case-run compiled nothing, if its first step is too short, or if slots depend on lengths
    (draft-decode).
    """
    steps = list(_shorter(schedule.steps[0]))
    if not harness.compiled or not steps:
        return []
    if room_left() <= 0:
        # Functions that torch.compile gave up on run uncompiled from now on.
        forget_compiled()
    earlier = {each.id for each in compilations()}
    deliver, harness.deliver = harness.deliver, lambda observed: observed
    try:
        with recompiling_allowed():
            for step in steps:
                count = len(harness.compiled)
                run_eager(harness, schedule, step, clock, label=step.label)
                if len(harness.compiled) == count:
                    return []
    except RunError:
        # Exceptions are reported by the steps of the run itself.
        return []
    finally:
        harness.deliver = deliver
    work, lengths = harness.compiled[-1], ", ".join(str(max(step.lens)) for step in steps)
    again = [each for each in compilations() if each.id not in earlier] if work == "torch.compile" else []
    where = Counter(each.what for each in again).most_common(1)
    what, why = next(((each.what, each.why) for each in reversed(again) if each.what == where[0][0]), ("", ""))
    return [
        Finding(
            "compiles-once",
            f"each of {STEPS} steps that differ only in lengths compiles again: {work}",
            where=what,
            hint="\n".join(filter(None, (why, _CURE))),
            step=f"the first eager step again, with longest requests of {lengths} keys",
        )
    ]


_CURE = (
    "compile for sizes that do not depend on lengths: by batch and rows, padded to the largest length, or dynamic "
    "(mark_dynamic, dynamic=True); no length among a tuner's keys or a kernel's constants"
)


def _shorter(step: Step) -> Iterator[Step]:
    """Steps of the same requests, each with one key fewer before the step, if that is possible."""
    longest = max((request.prefix for request in step.requests), default=0)
    if longest < STEPS or any(request.draft is not None for request in step.requests):
        return
    for fewer in range(1, STEPS + 1):
        requests = []
        for request in step.requests:
            prefix = max(request.prefix - fewer, 0)
            slots = request.slots[: prefix + request.new]
            requests.append(replace(request, prefix=prefix, slots=slots, shared=min(request.shared, prefix)))
        name = f"{step.name}, {fewer} keys shorter"
        label = f"the same requests with {fewer} fewer keys"
        # Its numbers are not compared, and no step before it would leave states of these lengths.
        yield replace(step, name=name, label=label, requests=tuple(requests), part_of=None, chunk_of=None, follows=None)
