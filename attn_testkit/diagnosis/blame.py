"""After a wrong result: run it again with one thing changed, to say which promise broke and which keys were used.

Nothing here runs while things are right. Each question is one controlled run on a fresh backend instance:

* does the NaN go away when slots of nobody hold zeros?           then it was read from there: ``reads-own-kv``
* is the same step right in eager?                                then it is the graph's
* is it right when memory born in a capture is left alone?        ``captures-cleanly``
* is it right when no row is padding?                             ``padding-inert``
* is it right when it is the only replay of the only bucket?      ``buckets-independent``
* is an eager step right on a fresh instance?                     ``steps-independent``
* is a step whose K and V are stored right when they are not yet? then k and v were read
* did planning the replay replace tensors that the graph reads?   ``addresses-stable``, else ``replay-follows-batch``
"""

from __future__ import annotations

from dataclasses import replace

from ..cases.schedule import Schedule, Step
from ..checks.numeric import finite, left_alone, matches_oracle, output_written, stacked
from ..checks.observation import Observation
from ..oracle.expect import expect
from ..results import Finding
from ..runner_modes.graphs import GraphRun
from .attended_keys import attended
from .hints import Evidence, hints
from .rerun import OTHER_FILL, Rerunner
from .swapped_rows import find_mixups

__all__ = ["explain_numeric"]


def is_right(schedule: Schedule, observed: Observation | None) -> bool:
    """Attention outputs within their limits."""
    if observed is None:
        return False
    expected = expect(schedule, observed.step)
    return not (output_written(observed, expected) or finite(observed, expected) or matches_oracle(observed, expected))


def _alone(schedule: Schedule, step: Step, bucket: int) -> Schedule:
    """Only this step, in a bucket of this size, and no other bucket."""
    return replace(schedule, buckets=(bucket,), steps=(replace(step, bucket=bucket),))


def explain_numeric(
    bench: Rerunner, finding: Finding, schedule: Schedule, observed: Observation, passed: list[Observation]
) -> Finding:
    """The same finding, under the promise that really broke, with the keys that were used and a hint."""
    step, why = observed.step, ""
    # Where fresh memory always holds the poison, a wrong number is none that was left unwritten.
    if finding.check != "matches-oracle" or not (observed.replay or bench.environment.poisons_fresh_memory):
        finding, why = _with_other_fill(bench, finding, schedule, observed)
    promise = finding.check
    eager = bench.eager(schedule, step)
    in_graph = observed.replay and is_right(schedule, eager)
    if in_graph:
        promise, why = _blame_graph(bench, schedule, step)
    elif observed.among and is_right(schedule, eager):
        promise, why = _AMONG[observed.among]
    elif finding.check == "finite" and not why:
        promise, why = _blame_nan(bench, schedule, step)
    by_itself = promise in ("buckets-independent", "steps-independent")
    footprint = None if by_itself else attended(bench, schedule, observed, in_graph=in_graph)
    evidence = Evidence(
        schedule,
        observed,
        expect(schedule, step),
        footprint,
        passed,
        mixups=find_mixups(None if by_itself else bench, schedule, observed, in_graph=in_graph),
        in_graph=in_graph and not by_itself,
        right_when_fresh=promise == "steps-independent",
        reads_foreign=promise == "reads-own-kv",
    )
    told = [text for text in (why, *hints(evidence)) if text]
    return replace(
        finding,
        check=promise,
        headline=_headline(finding, promise),
        attended=footprint.text if footprint else "",
        hint="\n".join(told[:3]),
    )


def _blame_nan(bench: Rerunner, schedule: Schedule, step: Step) -> tuple[str, str]:
    """Where it was read: in k and v that are stored already, in slots of nobody, or not known."""
    if step.stored and is_right(schedule, bench.eager(schedule, replace(step, stored=False))):
        return "finite", "right with save_kv_cache=True; with False, k and v hold NaN, and they were read"
    calm = bench.eager(schedule, step, unowned=0.0)
    if calm is not None and _all_finite(calm, schedule):
        return "reads-own-kv", "with zeros instead of NaN in slots of nobody the result is finite"
    return "finite", ""


_AMONG = {
    "graphs": ("buckets-independent", "on a fresh instance, without graphs, the same eager step is right"),
    "steps": (
        "steps-independent",
        "as the first step of a fresh instance it is right: something of an earlier step is kept",
    ),
}


def _all_finite(observed: Observation, schedule: Schedule) -> bool:
    return bool(stacked(observed, expect(schedule, observed.step)).isfinite().all())


def _with_other_fill(
    bench: Rerunner, finding: Finding, schedule: Schedule, observed: Observation
) -> tuple[Finding, str]:
    """Not written, computed as NaN, or made from memory that nobody wrote? Another fill of fresh memory tells.

    Some CPU conversions give a NaN with all bits set, which is the poison.
    """
    expected = expect(schedule, observed.step)
    if observed.replay:
        answer = bench.graph(schedule, fill=OTHER_FILL)
        again, first = answer.replay_of(observed.step) if answer else None, observed
    else:
        again = bench.eager(schedule, observed.step, fill=OTHER_FILL)
        first = observed if bench.environment.poisons_fresh_memory else bench.eager(schedule, observed.step) or observed
    if again is None:
        return finding, ""
    unwritten = output_written(first, expected)
    if unwritten and left_alone(first, again, expected, OTHER_FILL):
        return replace(unwritten[0], step=finding.step), ""
    if finding.check == "matches-oracle":
        return finding, ""
    computed = replace(
        finding,
        check="finite",
        headline=finding.headline.replace("output that was never written", "nan in its output"),
        where=finding.where.replace(" still holds the poison", " is nan"),
    )
    if not _all_finite(again, schedule):
        return computed, ""
    return computed, (
        "with numbers instead of NaN in fresh memory it is finite: it reads memory that nobody wrote, such as a "
        "workspace or the partial results of splits that are empty"
    )


def _headline(finding: Finding, promise: str) -> str:
    suffix = {
        "reads-own-kv": ": it read a slot that is not its own",
        "replay-follows-batch": " at a replay, and is right in eager",
        "padding-inert": ", and is right without padded rows",
        "buckets-independent": " after other replays, and is right alone",
        "steps-independent": ", after another step; on a fresh instance it is right",
        "captures-cleanly": ": it lives on memory that was born in a capture",
        "addresses-stable": " at a replay, because planning replaced tensors that the graph reads",
    }.get(promise, "")
    return finding.headline if promise == finding.check else finding.headline + suffix


def _blame_graph(bench: Rerunner, schedule: Schedule, step: Step) -> tuple[str, str]:
    """Which graph promise a replay broke whose eager run is right."""
    lone = bench.graph(schedule)
    if lone is not None and is_right(schedule, lone.replay_of(step)):
        return (
            "buckets-independent",
            "it is right when no other mode and no eager step uses the instance, and no other instance plans meanwhile",
        )
    calm = bench.graph(schedule, poison_allocated=False)
    if calm is not None and calm.allocated_in_capture and is_right(schedule, calm.replay_of(step)):
        first = calm.allocated_in_capture[0]
        return (
            "captures-cleanly",
            f"self.{first.path} was allocated while {first.where} was captured, and is read before it is written: "
            "allocate it in the constructor or in init_cuda_graph_state",
        )
    alone = bench.graph(_alone(schedule, step, step.bucket))
    if alone is not None and is_right(schedule, _last(alone)):
        return "buckets-independent", "as the only replay of the only bucket it is right"
    if alone is not None and alone.replaced and _reads_replaced(bench, schedule, step):
        names = ", ".join(f"self.{path}" for path in alone.replaced[:3])
        return "addresses-stable", f"init_forward_metadata_out_graph replaced {names} at a replay; fill it in place"
    if step.bucket > step.bs:
        exact = bench.graph(_alone(schedule, step, step.bs))
        if exact is not None and is_right(schedule, _last(exact)):
            return "padding-inert", f"in a bucket of exactly {step.bs} it is right"
    return "replay-follows-batch", "in eager it is right: something of the capture-time batch is still in force"


def _reads_replaced(bench: Rerunner, schedule: Schedule, step: Step) -> bool:
    """Whether it is right once the replaced tensors hold what their successors do: a plan may replace its own."""
    copied = bench.graph(_alone(schedule, step, step.bucket), copy_into_replaced=True)
    return copied is None or is_right(schedule, _last(copied))


def _last(graphs: GraphRun) -> Observation | None:
    return graphs.observed[-1][1] if graphs.observed else None
