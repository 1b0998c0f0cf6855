"""After a wrong result: run it again with one thing changed, to say which check it really fails and what was read.

Nothing here runs while things are right. Each question is one controlled run on a fresh backend instance:

* does the NaN go away when unowned slots hold zeros?             then it was read from there: ``reads-own-kv``
* is the same step right in eager?                                then it is the graph's
* is it right when memory allocated in a capture is left alone?    ``captures-cleanly``
* is it right when no row is padding?                             ``padding-inert``
* is it right when it is the only replay of the only bucket?      ``buckets-independent``
* is an eager step right on a fresh instance?                     ``steps-independent``
* is a step whose K and V are stored right when they are not yet? then k and v were read
* is an eager first step wrong in the same rows when it is run again?  if not: a race
* is it right with zeros in fresh memory?                         then something is taken for cleared
* is the first step right in a case that lacks one thing?          then the fault hangs on that: ``changed_case.py``
* did planning the replay replace tensors that the graph reads?   ``addresses-stable``, else ``replay-follows-batch``
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..cases.schedule import Schedule, Step
from ..checks import Judgement
from ..checks.numeric import output_written
from ..checks.observation import Observation
from ..oracle.expect import expect
from ..results import Finding
from ..runner_modes.graphs import GraphRun
from .changed_case import ChangedCases
from .figures import error_map, key_map
from .hints import Evidence
from .questions import Asked, ask
from .rerun import CLEAR, OTHER_FILL, Rerunner

__all__ = ["explain_numeric", "name_check"]


def name_check(rerunner: Rerunner, finding: Finding, schedule: Schedule, observed: Observation) -> Finding:
    """The same finding under the check that it really fails, without its cause."""
    return _blamed(rerunner, finding, schedule, observed).named


def explain_numeric(
    rerunner: Rerunner, finding: Finding, schedule: Schedule, observed: Observation, passed: list[Observation]
) -> Finding:
    """The same finding, under the check that it really fails, with what was attended to and a hint.

    ``finding``: of a check in ``NUMERIC``, about ``observed``. ``passed``: steps of the same case-run that are right.
    """
    judgement = Judgement(observed, expect(schedule, observed.step))
    blamed = _blamed(rerunner, finding, schedule, observed)
    check, why, eager, in_graph = blamed.check, blamed.why, blamed.eager, blamed.in_graph
    if blamed.in_eager:
        why = why or _not_every_time(rerunner, schedule, observed, eager)
        why = why or _with_clear_memory(rerunner, schedule, observed, eager)
    by_itself = check in ("buckets-independent", "steps-independent")
    evidence = Evidence(
        schedule,
        judgement,
        None,
        passed,
        in_graph=in_graph and not by_itself and (not blamed.graphs_alone or check in _OF_A_GRAPH),
        right_when_fresh=check == "steps-independent",
        right_when_alone=why == _AS_THE_ONLY_REPLAY,
        right_with_zeros=why == _RIGHT_WITH_ZEROS,
        computes_nan=check == "finite" and not why,
        reads_foreign=check == "reads-own-kv",
        changed=ChangedCases(rerunner, schedule) if _wrong_in_eager(rerunner, schedule, eager) else None,
    )
    asked = ask(Asked(evidence, None if by_itself else rerunner, in_graph))
    attended = asked.evidence.attended
    lines = [text for text in (why, *asked.texts) if text]
    # Where an experiment has shown the cause, what was attended to follows from it.
    most = 1 if check in _SHOWN or why == _NO_OTHER_MODE else _MOST_HINTS
    if why == _FINITE_WITH_ZEROS:
        # It says what the check says. Others say where that slot was met.
        lines = [*lines[1:most], why]
    return replace(
        blamed.named,
        headline=_headline(blamed.found, check, why),
        attended=attended.text if attended else "",
        hint="\n".join(lines[:most]),
        errors=error_map(judgement),
        keys=key_map(attended) if attended else None,
    )


@dataclass(frozen=True)
class _Blamed:
    """A finding under the check that it really fails, and what the experiments gave that showed it."""

    found: Finding
    """As it was seen, or as other numbers in fresh memory showed it."""
    check: str
    why: str
    eager: Judgement | None
    """The same step in eager mode; None where it does not run there."""
    in_graph: bool
    """Whether it is wrong in a graph alone, as far as is known."""
    graphs_alone: bool
    """Whether there is no eager mode to hold it against."""

    @property
    def named(self) -> Finding:
        return replace(self.found, check=self.check, headline=_headline(self.found, self.check, self.why))

    @property
    def in_eager(self) -> bool:
        return not self.graphs_alone and not self.in_graph


def _blamed(rerunner: Rerunner, finding: Finding, schedule: Schedule, observed: Observation) -> _Blamed:
    step, judgement = observed.step, Judgement(observed, expect(schedule, observed.step))
    eager = _judged(schedule, rerunner.eager(schedule, step))
    finding, why = _with_other_fill(rerunner, finding, schedule, judgement, eager)
    graphs_alone = observed.replay and not rerunner.runs_eagerly(schedule)
    in_graph = observed.replay and (graphs_alone or _right(eager))
    if graphs_alone:
        check, why = _blame_without_eager(rerunner, finding, why, schedule, step)
    elif in_graph:
        check, why = _blame_graph(rerunner, schedule, step)
    else:
        check, why = _blame_eager(rerunner, finding, why, schedule, observed, right=_right(eager))
    return _Blamed(finding, check, why, eager, in_graph, graphs_alone)


_OF_NUMBERS = ("matches-oracle", "keys-counted-once")
"""Ids of checks whose findings are about finite values."""
_SHOWN = ("addresses-stable", "captures-cleanly", "padding-inert")
"""Ids of checks whose first hint says why: one thing was changed, and the step was right."""
_MOST_HINTS = 3
"""Lines of a hint: the first ones say most."""


def _judged(schedule: Schedule, observed: Observation | None) -> Judgement | None:
    return None if observed is None else Judgement(observed, expect(schedule, observed.step))


def _right(judgement: Judgement | None) -> bool:
    """Attention outputs within their limits; a run that raised has none."""
    return judgement is not None and judgement.right


def _wrong_in_eager(rerunner: Rerunner, schedule: Schedule, eager: Judgement | None) -> bool:
    return rerunner.runs_eagerly(schedule) and eager is not None and not eager.right


def _alone(schedule: Schedule, step: Step, bucket: int) -> Schedule:
    """Only this step, in a bucket of this size, and no other bucket."""
    return replace(schedule, buckets=(bucket,), steps=(replace(step, bucket=bucket),))


def _blame_nan(rerunner: Rerunner, schedule: Schedule, step: Step) -> tuple[str, str]:
    """(check, why): NaN was read in k and v that are stored already, in unowned slots, or nobody knows."""
    if step.stored and _right(_judged(schedule, rerunner.eager(schedule, replace(step, stored=False)))):
        return (
            "finite",
            "with save_kv_cache=False k and v hold NaN, and they are read: with save_kv_cache=True it is right",
        )
    if rerunner.runs_eagerly(schedule):
        again = rerunner.eager(schedule, step, unowned=0.0)
    else:
        run = rerunner.graph(schedule, unowned=0.0)
        again = run.replay_of(step) if run else None
    calm = _judged(schedule, again)
    if calm is not None and calm.all_finite:
        return "reads-own-kv", _RIGHT_WITH_ZEROS if calm.right else _FINITE_WITH_ZEROS
    return "finite", ""


_FINITE_WITH_ZEROS = "with zeros instead of NaN in unowned slots the result is finite"
_RIGHT_WITH_ZEROS = f"{_FINITE_WITH_ZEROS}, and right"
_NO_OTHER_INSTANCE = (
    "something that all instances of the process share is replaced before it is used: it is right when no other "
    "instance is at work"
)
_NO_OTHER_MODE = (
    "a step of another mode changes what the modes share, and a plan keeps it: on an instance that runs only this "
    "mode it is right"
)
_AMONG = {
    "graphs": ("buckets-independent", "on a fresh instance, without graphs, the same eager step is right"),
    "steps": (
        "steps-independent",
        "something of an earlier step is kept: as the first step of a fresh instance it is right",
    ),
    "instances": ("steps-independent", _NO_OTHER_INSTANCE),
    "modes": ("steps-independent", _NO_OTHER_MODE),
}
"""What else ran on the instance before an eager step that is right on a fresh one, or beside it -> (check, why)."""


def _blame_eager(
    rerunner: Rerunner, finding: Finding, why: str, schedule: Schedule, observed: Observation, *, right: bool
) -> tuple[str, str]:
    """(check, why) of a step that is wrong eagerly as well. ``right``: on a fresh instance it is right."""
    if observed.among and right:
        return _AMONG[observed.among]
    if finding.check == "finite" and not why:
        return _blame_nan(rerunner, schedule, observed.step)
    return finding.check, why


def _not_every_time(rerunner: Rerunner, schedule: Schedule, observed: Observation, eager: Judgement | None) -> str:
    """Of a step that nothing ran before: whether it is right, or wrong in other rows, when it is run again."""
    if observed.replay or observed.among or eager is None:
        return ""
    if eager.right:
        return _RIGHT_AGAIN
    again = _judged(schedule, rerunner.eager(schedule, observed.step))
    same = again is not None and torch.equal(_where_wrong(again), _where_wrong(eager))
    return "" if again is None or same else _OTHER_ROWS


def _with_clear_memory(rerunner: Rerunner, schedule: Schedule, observed: Observation, eager: Judgement | None) -> str:
    """Of a step that nothing ran before: whether it is right where fresh memory holds zeros."""
    if observed.replay or observed.among or eager is None or eager.right:
        return ""
    return _RIGHT_IF_CLEAR if _right(_judged(schedule, rerunner.eager(schedule, observed.step, fill=CLEAR))) else ""


def _where_wrong(judgement: Judgement) -> torch.Tensor:
    """[2, L, T, Hq] bool: heads of rows that are wrong, and that are not finite."""
    return torch.stack([judgement.wrong.any(-1), (~judgement.finite).any(-1)])


_RIGHT_AGAIN = (
    "probably a race, an order that is not enforced, or memory that was never written: run again on a fresh instance "
    "it is right, with nothing else changed"
)
_RIGHT_IF_CLEAR = (
    "a counter, a flag, a work list or a scratch is taken for cleared, and is never cleared: with zeros in fresh "
    "memory it is right"
)
_OTHER_ROWS = (
    "probably a race, an order that is not enforced, or memory that was never written: run again it is wrong in "
    "other rows or heads, with nothing changed"
)


def _with_other_fill(
    rerunner: Rerunner, finding: Finding, schedule: Schedule, judgement: Judgement, eager: Judgement | None
) -> tuple[Finding, str]:
    """Not written, computed as NaN, or made from memory that nobody wrote? Another fill of fresh memory shows.

    Some CPU conversions give a NaN with all bits set, which is the poison. And where fresh memory is not poisoned in an
    ordinary run, a wrong number may be one that was left unwritten: ``eager``, the same step on a fresh instance with
    poison, has the poison there.
    """
    observed, first = judgement.observed, judgement
    if not observed.replay and not judgement.unwritten.any() and eager is not None:
        first = eager
    if finding.check in _OF_NUMBERS and not first.unwritten.any():
        return finding, ""
    if observed.replay:
        answer = rerunner.graph(schedule, fill=OTHER_FILL)
        again = _judged(schedule, answer.replay_of(observed.step)) if answer else None
    else:
        again = _judged(schedule, rerunner.eager(schedule, observed.step, fill=OTHER_FILL))
    if again is None:
        return finding, ""
    unwritten = output_written(first)
    if unwritten and _left_alone(first, again, OTHER_FILL):
        return replace(unwritten[0], step=finding.step), ""
    if finding.check in _OF_NUMBERS:
        return finding, ""
    computed = replace(
        finding,
        check="finite",
        headline=finding.headline.replace("output that was never written", "nan in its output"),
        where=finding.where.replace(" still holds the poison", " is nan"),
    )
    if not again.all_finite:
        return computed, ""
    return computed, (
        "it reads memory that was never written, such as a workspace or the partial results of empty splits: with "
        "numbers instead of NaN in fresh memory it is finite"
    )


def _left_alone(first: Judgement, second: Judgement, fill: int) -> bool:
    """Whether a row of a head holds the poison in one run and, where that is the byte ``fill``, that in another.

    All of what was poison in the row must hold it: one number of a row has such bits by chance.
    """
    again = second.out.view(torch.uint8).reshape(*second.out.shape, -1)
    filled = (again == fill).all(-1)
    return bool((first.unwritten.any(-1) & (filled | ~first.unwritten).all(-1)).any())


_HEADLINE_ENDS = {
    "reads-own-kv": ": it read a slot that is not its own",
    "replay-follows-batch": " at a replay, and is right in eager",
    "padding-inert": ", and is right without padded rows",
    "buckets-independent": " after other replays, and is right alone",
    "steps-independent": ", after another step; on a fresh instance it is right",
    "captures-cleanly": ": it lives on memory that was allocated in a capture",
    "addresses-stable": " at a replay, because planning replaced tensors that the graph reads",
    _NO_OTHER_INSTANCE: ", while another instance is at work; alone it is right",
    _NO_OTHER_MODE: ", after a step of another mode; on a fresh instance it is right",
}
"""Why, or the check that diagnosis reports instead -> what the headline of the wrong number is followed by."""


def _headline(finding: Finding, check: str, why: str) -> str:
    of_check = "" if check == finding.check else _HEADLINE_ENDS.get(check, "")
    return finding.headline + _HEADLINE_ENDS.get(why, of_check)


def _blame_graph(rerunner: Rerunner, schedule: Schedule, step: Step) -> tuple[str, str]:
    """(check, why) of a replay that is wrong and whose eager run is right."""
    lone = rerunner.graph(schedule)
    if lone is not None and _right(_judged(schedule, lone.replay_of(step))):
        return (
            "buckets-independent",
            "it is right when no other mode and no eager step uses the instance, and no other instance is at work",
        )
    calm = rerunner.graph(schedule, poison_allocated=False)
    if calm is not None and calm.allocated_in_capture and _right(_judged(schedule, calm.replay_of(step))):
        first = calm.allocated_in_capture[0]
        return (
            "captures-cleanly",
            f"self.{first.path} was allocated while {first.where} was captured, and is read before it is written: "
            "allocate it in the constructor or in init_cuda_graph_state",
        )
    alone = rerunner.graph(_alone(schedule, step, step.bucket))
    if alone is not None and _right(_judged(schedule, _last(alone))):
        return "buckets-independent", _AS_THE_ONLY_REPLAY
    if alone is not None and alone.replaced and _reads_replaced(rerunner, schedule, step):
        names = ", ".join(f"self.{path}" for path in alone.replaced[:3])
        return "addresses-stable", f"init_forward_metadata_out_graph replaced {names} at a replay; fill it in place"
    least = _least_bucket(schedule, step)
    if step.bucket > least:
        exact = rerunner.graph(_alone(schedule, step, least))
        if exact is not None and _right(_judged(schedule, _last(exact))):
            return "padding-inert", f"{_PADDED_ROWS_REACH_LIVE_ONES}: in a bucket of exactly {least} it is right"
    return (
        _NOTHING_ELSE,
        "the graph still uses a value from capture time (a length, stride, grid size or pointer): in eager it is right",
    )


_PADDED_ROWS_REACH_LIVE_ONES = (
    "data of padded rows reach real ones, by a sum, a maximum or a work list over all rows, or by offsets and counts "
    "of the padded batch"
)
_AS_THE_ONLY_REPLAY = "as the only replay of the only bucket it is right"
"""Why, where the replays before it are the cause."""
_OF_A_GRAPH = ("captures-cleanly", "addresses-stable", "padding-inert")
"""What replays alone show to be the graph's: nothing else is known to be right in eager without an eager run."""
_NOTHING_ELSE = "replay-follows-batch"
"""What is left of a replay that is wrong by itself as well, and right in eager."""


def _blame_without_eager(
    rerunner: Rerunner, finding: Finding, why: str, schedule: Schedule, step: Step
) -> tuple[str, str]:
    """(check, why) of a wrong replay of a mode that is claimed in graphs alone. ``why``: what is known already."""
    check, cause = _blame_graph(rerunner, schedule, step)
    if check != _NOTHING_ELSE:
        return check, cause
    if finding.check == "finite" and not why:
        return _blame_nan(rerunner, schedule, step)
    return finding.check, why or (
        f"{schedule.case.mode} is declared only in graphs, so it is not known whether eager would be wrong too"
    )


def _least_bucket(schedule: Schedule, step: Step) -> int:
    """The smallest that holds the requests and their rows: of an extend, few requests may have many."""
    return max(step.bs, -(-step.tokens // schedule.case.width))


def _reads_replaced(rerunner: Rerunner, schedule: Schedule, step: Step) -> bool:
    """Whether it is right once the replaced tensors hold what their successors do: a plan may replace its own."""
    copied = rerunner.graph(_alone(schedule, step, step.bucket), copy_into_replaced=True)
    return copied is None or _right(_judged(schedule, _last(copied)))


def _last(run: GraphRun) -> Observation | None:
    return run.observed[-1][1] if run.observed else None
