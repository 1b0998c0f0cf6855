"""Whether lengths alone make a backend compile again: more eager steps on the instance of a drive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from attn_testkit.cases.schedule import Schedule, Step
from attn_testkit.graphs.compilers import compilations, forget_compiled, recompiling_allowed, room_left
from attn_testkit.results import Finding

from .clock import Clock
from .eager import run_eager
from .errors import DriveError
from .harness import ServerHarness

__all__ = ["STEPS", "compiles_once"]

STEPS = 5
"""Steps of other lengths. torch.compile makes a size dynamic once it has seen two, and may do so for one that a tile
divides and one that none does: what compiles in the fifth compiles in all."""


def compiles_once(harness: ServerHarness, schedule: Schedule, clock: Clock) -> list[Finding]:
    """A finding where every one of ``STEPS`` eager steps that differ in lengths alone compiles or tunes something.

    Nothing is run where the drive compiled nothing, where its first step is too short, or where slots depend on lengths
    (draft-decode).
    """
    steps = list(_shorter(schedule.steps[0]))
    if not harness.compiled or not steps:
        return []
    if room_left() <= 0:
        # What was given up is run as it is, and compiles no more.
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
    except DriveError:
        # Whether the backend runs is judged in the steps of the drive.
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
            f"each of {STEPS} steps that differ in lengths alone compiles anew: {work}",
            where=what,
            hint="\n".join(filter(None, (why, _CURE))),
            step=f"the first eager step again, with longest requests of {lengths} keys",
        )
    ]


_CURE = (
    "compile for what lengths leave alone: sizes by batch and rows, padded to the longest that there can be, or "
    "dynamic (mark_dynamic, dynamic=True); no length among a tuner's keys or a kernel's constants"
)


def _shorter(step: Step) -> Iterator[Step]:
    """The same requests with fewer keys before the step, each time a token fewer; none where that is not possible."""
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
        label = f"the same requests with {fewer} keys fewer"
        yield replace(step, name=name, label=label, requests=tuple(requests), part_of=None, chunk_of=None)
