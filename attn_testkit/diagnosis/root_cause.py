"""Root-cause attribution: a wrong step is run again with one change, to find the check that it really fails.

Nothing here runs while results are right. Each question is one controlled run on a fresh backend instance:

* does the NaN go away if the memory ends with the last row? then a tile is not cleared there
* does the NaN go away when unowned slots hold zeros?             then it was read from there: ``reads-own-kv``
* is it right if the host waits before it plans the next step?    then that plan overwrites what a queued step reads
* is the same step right in eager mode?                           then the graph is wrong
* is it right when memory allocated in a capture is not poisoned?  ``captures-cleanly``
* is it right when its tensors are restored before each replay?  then a counter is not reset: the hint names it
* is it right when no row is padding?                             ``padding-inert``
* is it right when it is the only replay of the only bucket?      ``buckets-independent``
* is it right when the graph is captured with the same batch?     then the graph keeps a value of its capture
* is an eager step right on a fresh instance?                     ``steps-independent``
* is a step whose K and V are stored right when they are not yet? then k and v were read
* is a step that is cut into two batches right as one?          then the two share something
* is an eager first step wrong in the same rows when it is run again?  if not: a race
* is it right with zeros in fresh memory?                         then some memory is assumed to be zero
* is the first step right in a case that lacks one thing?          then the bug needs that: ``changed_case.py``
* did planning the replay replace tensors that the graph reads?   ``addresses-stable``, else ``replay-follows-batch``
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..cases.features.server.narrower_widths import shares_widths
from ..cases.features.server.two_batch_overlap import is_cut
from ..checks import Comparison
from ..checks.numeric import output_written
from ..checks.observation import Observation
from ..families.expected import expect
from ..families.table import families_of, family_of
from ..results.finding import Finding
from ..runner_modes.graphs import GraphRun
from ..steps.schedule import Schedule, Step, make_schedule
from .capture_values import OVERFLOWS, keeps_capture_values, reason_of_a_replay
from .changed_case import ChangedCases
from .figures import error_map, key_map
from .hints import Evidence
from .lone_step import least_bucket, lone_step
from .questions import Asked, ask
from .raised import OVERTAKEN, plans_overtake
from .rerun import CLEAR, OTHER_FILL, Rerunner, TimeUp


def name_check(rerunner: Rerunner, finding: Finding, schedule: Schedule, observed: Observation) -> Finding:
    """Move a finding to the check that it really fails, without looking for its cause."""
    return _blamed(rerunner, finding, schedule, observed).named


def explain_numeric(
    rerunner: Rerunner, finding: Finding, schedule: Schedule, observed: Observation, passed: list[Observation]
) -> Finding:
    """Move a finding to the check that it really fails, and add the attended KV tokens and a hint.

    ``finding``: of a check in ``NUMERIC``, about ``observed``. ``passed``: steps of the same case-run that are right.
    """
    comparison = Comparison(observed, expect(schedule, observed.step))
    blamed = _blamed(rerunner, finding, schedule, observed)
    check, why, eager, in_graph = blamed.check, blamed.why, blamed.eager, blamed.in_graph
    rerunner.may_be_cut = True
    by_itself = check in ("buckets-independent", "steps-independent")
    with contextlib.suppress(TimeUp):
        if not by_itself and _right_as_one_batch(rerunner, schedule, observed):
            why = _AS_ONE_BATCH
        if blamed.in_eager:
            why = why or _not_every_time(rerunner, schedule, observed, eager)
            why = why or _with_clear_memory(rerunner, schedule, observed, eager)
    wrong_in_eager = rerunner.runs_eagerly(schedule) and eager is not None and not eager.right
    evidence = Evidence(
        schedule,
        comparison,
        None,
        passed,
        in_graph=in_graph and not by_itself and (not blamed.graphs_alone or check in _OF_A_GRAPH),
        right_when_fresh=check == "steps-independent",
        right_when_alone=why == _AS_THE_ONLY_REPLAY,
        right_with_zeros=why == f"{_finite_with_zeros(schedule)}{_AND_RIGHT}",
        computes_nan=check == "finite" and not why,
        reads_foreign=check == family_of(schedule.case).reads,
        of_capture=keeps_capture_values(why),
        changed=_changed_cases(rerunner, schedule, comparison) if wrong_in_eager else None,
    )
    asked = ask(Asked(evidence, None if by_itself else rerunner, in_graph))
    attended = asked.evidence.attended
    lines = [text for text in (why, *asked.texts) if text]
    # If an experiment has shown the cause, the attended tokens follow from it.
    causes = (_NO_OTHER_MODE, _AS_ONE_BATCH, OVERFLOWS, OVERTAKEN)
    shown = check in _SHOWN or why in causes or why.startswith(_NOT_RESET)
    most = 1 if shown else _MOST_HINTS
    zeros = _finite_with_zeros(schedule)
    if why in (zeros, f"{zeros}{_AND_RIGHT}", _finite_with_zeros(schedule, _UNOWNED)):
        # This hint repeats the check. The others say where that slot was read, or what spoils the result.
        lines = [*lines[1:most], why]
    return replace(
        blamed.named,
        headline=_headline(blamed.found, check, why, schedule),
        attended=attended.text if attended else "",
        hint="\n".join(lines[:most]),
        errors=error_map(comparison),
        keys=key_map(attended) if attended else None,
    )


@dataclass(frozen=True)
class _Blamed:
    """A finding under the check that it really fails, with the results of the experiments that showed it."""

    found: Finding
    """The finding as observed, or as a run with other contents of fresh memory showed it."""
    check: str
    why: str
    eager: Comparison | None
    """The same step in eager mode; None if it does not run there."""
    in_graph: bool
    """True if it is known to be wrong only in a graph."""
    graphs_alone: bool
    """True if there is no eager mode to compare with."""
    schedule: Schedule

    @property
    def named(self) -> Finding:
        headline = _headline(self.found, self.check, self.why, self.schedule)
        return replace(self.found, check=self.check, headline=headline)

    @property
    def in_eager(self) -> bool:
        return not self.graphs_alone and not self.in_graph


def _blamed(rerunner: Rerunner, finding: Finding, schedule: Schedule, observed: Observation) -> _Blamed:
    step, comparison = observed.step, Comparison(observed, expect(schedule, observed.step))
    eager = _evaluated(schedule, rerunner.eager(schedule, step))
    finding, why = _with_other_fill(rerunner, finding, schedule, comparison, eager)
    graphs_alone = observed.replay and not rerunner.runs_eagerly(schedule)
    in_graph = observed.replay and (graphs_alone or _right(eager))
    if graphs_alone:
        check, why = _blame_without_eager(rerunner, finding, why, schedule, step)
    elif in_graph:
        check, why = _blame_graph(rerunner, schedule, step)
    else:
        check, why = _blame_eager(rerunner, finding, why, schedule, observed, right=_right(eager))
    return _Blamed(finding, check, why, eager, in_graph, graphs_alone, schedule)


_OF_NUMBERS = ("matches-oracle", "keys-counted-once")
"""Ids of checks whose findings are about finite values."""
_SHOWN = ("addresses-stable", "captures-cleanly", "padding-inert")
"""Ids of checks whose first hint is proved by an experiment: with one change the step was right."""
_MOST_HINTS = 3
"""Number of lines of a hint: the first ones are the most useful."""


def _evaluated(schedule: Schedule, observed: Observation | None) -> Comparison | None:
    return None if observed is None else Comparison(observed, expect(schedule, observed.step))


def _right(comparison: Comparison | None) -> bool:
    """True if attention outputs are within their limits; a run that raised has none."""
    return comparison is not None and comparison.right


def _changed_cases(rerunner: Rerunner, schedule: Schedule, comparison: Comparison) -> ChangedCases:
    lens, wrong = comparison.observed.step.lens, comparison.wrong_requests
    right = max((n for place, n in enumerate(lens) if place not in wrong), default=0)
    return ChangedCases(rerunner, schedule, right=right, wrong=min((lens[place] for place in wrong), default=0))


def _blame_nan(rerunner: Rerunner, schedule: Schedule, step: Step) -> tuple[str, str]:
    """Return check and reason of a NaN: read from k and v that are stored already, from unowned slots, or unknown."""
    given = _evaluated(schedule, rerunner.eager(schedule, replace(step, stored=False))) if step.stored else None
    if given is not None and given.right:
        return "finite", f"{_STORED_NAN} right"
    if schedule.case.has_rows_behind:
        short = _evaluated(schedule, _again(rerunner, schedule, step, nothing_behind=True))
        if short is not None and short.all_finite:
            return "finite", f"{_ROWS_BEHIND} {'right' if short.right else 'finite'}"
    calm = _evaluated(schedule, _again(rerunner, schedule, step, unowned=0.0))
    if calm is None or not calm.all_finite:
        # A kernel that reads k and v in the place of q is wrong without NaN too, if the data show it.
        return "finite", f"{_STORED_NAN} finite, and wrong" if given is not None and given.all_finite else ""
    family, finite = family_of(schedule.case), _finite_with_zeros(schedule)
    if family.unread and rerunner.runs_eagerly(schedule):
        own = family.with_unread_finite(step)
        calm_own = _evaluated(schedule, rerunner.eager(schedule, own))
        if calm_own is not None and calm_own.all_finite:
            return family.reads, f"{_finite_with_numbers(family.unread)}{_MASKED_TOO_LATE if calm_own.right else ''}"
        finite = _finite_with_zeros(schedule, _UNOWNED)
    return family.reads, f"{finite}{_AND_RIGHT}" if calm.right else finite


def _again(rerunner: Rerunner, schedule: Schedule, step: Step, **changes: Any) -> Observation | None:
    """The step with these changes, eagerly if the mode runs so, else in graphs."""
    if rerunner.runs_eagerly(schedule):
        return rerunner.eager(schedule, step, **changes)
    run = rerunner.graph(schedule, **changes)
    return run.replay_of(step) if run else None


_ROWS_BEHIND = (
    "rows after the last one are loaded, which hold NaN as the end of a longer buffer may: clear them in the last "
    "tile, since 0 * NaN is NaN; if the memory ends with the last row, the result is"
)
_STORED_NAN = "with save_kv_cache=False k and v hold NaN, and they are read: with save_kv_cache=True the result is"


_UNOWNED = "unowned slots"
_AND_RIGHT = ", and right"


def _finite_with_zeros(schedule: Schedule, poisoned: str = "") -> str:
    own, *others = families_of(schedule.case)
    memory = ", and ".join([own.poisoned, *(each.beside.poisoned for each in others if each.beside)])
    return f"with zeros instead of NaN in {poisoned or memory} the result is finite"


def _finite_with_numbers(unread: str) -> str:
    return f"with numbers instead of NaN in {unread} the result is finite"


_MASKED_TOO_LATE = ", and right: 0 * NaN is NaN, so leave those keys out when K and V are loaded"


_NO_OTHER_INSTANCE = (
    "state that all instances of the process share is replaced before it is used: without a co-resident instance the "
    "step is right"
)
_NO_OTHER_MODE = (
    "a step of another mode changes state that the modes share, and a plan keeps it: the step passes on an instance "
    "that runs only this mode"
)
_NO_OTHER_WIDTH = (
    "a width that is not the batch's is used, such as that of the configuration: the step passes on an instance whose "
    "batches all have this width"
)
_AMONG = {
    "graphs": ("buckets-independent", "the same eager step passes on a fresh instance without graphs"),
    "steps": (
        "steps-independent",
        "state of an earlier step is kept: the step is right as the first of a fresh instance",
    ),
    "instances": ("steps-independent", _NO_OTHER_INSTANCE),
    "modes": ("steps-independent", _NO_OTHER_MODE),
    "widths": ("steps-independent", _NO_OTHER_WIDTH),
}
"""Other work of an eager step's instance or of a co-resident one -> (check, reason), if the step is right without that
work."""


def _blame_eager(
    rerunner: Rerunner, finding: Finding, why: str, schedule: Schedule, observed: Observation, *, right: bool
) -> tuple[str, str]:
    """Return check and reason of a step that is wrong in eager mode too. ``right``: true if the step is right on a
    fresh instance."""
    if observed.ran_before and right:
        return _AMONG[observed.ran_before]
    if plans_overtake(schedule) and _right(
        _evaluated(schedule, rerunner.eager(schedule, observed.step, wait_before_plans=True))
    ):
        return finding.check, OVERTAKEN
    if finding.check == "finite" and not why:
        return _blame_nan(rerunner, schedule, observed.step)
    return finding.check, why


def _not_every_time(rerunner: Rerunner, schedule: Schedule, observed: Observation, eager: Comparison | None) -> str:
    """Hint for the first step of an instance that is right, or wrong in other rows, when it is run again."""
    if observed.replay or observed.ran_before or eager is None:
        return ""
    if eager.right:
        return _RIGHT_AGAIN
    again = _evaluated(schedule, rerunner.eager(schedule, observed.step))
    same = again is not None and torch.equal(_where_wrong(again), _where_wrong(eager))
    return "" if again is None or same else _OTHER_ROWS


def _with_clear_memory(rerunner: Rerunner, schedule: Schedule, observed: Observation, eager: Comparison | None) -> str:
    """Hint for the first step of an instance that is right with zeros in fresh memory."""
    if observed.replay or observed.ran_before or eager is None or eager.right:
        return ""
    return _RIGHT_IF_CLEAR if _right(_evaluated(schedule, rerunner.eager(schedule, observed.step, fill=CLEAR))) else ""


def _right_as_one_batch(rerunner: Rerunner, schedule: Schedule, observed: Observation) -> bool:
    """True if the step of a case with two-batch overlap is right if it is not cut."""
    if not is_cut(schedule.case):
        return False
    if not observed.replay:
        return _right(_evaluated(schedule, rerunner.eager(schedule, observed.step, uncut=True)))
    run = rerunner.graph(schedule, uncut=True)
    return run is not None and _right(_evaluated(schedule, run.replay_of(observed.step)))


def _where_wrong(comparison: Comparison) -> torch.Tensor:
    """Heads of rows that are wrong, and that are not finite, [2, L, T, Hq] bool."""
    return torch.stack([comparison.wrong.any(-1), (~comparison.finite).any(-1)])


_AS_ONE_BATCH = (
    "the two batches of a step share what each needs for itself (a plan, a buffer of graphs, an output), or a slice is "
    "not read from its first element on: without two-batch overlap the step is right"
)
_RIGHT_AGAIN = (
    "probably a race, an order that is not enforced, or memory that was never written: the step is right when it is "
    "run again on a fresh instance without any change"
)
_RIGHT_IF_CLEAR = (
    "a counter, flag, work list or scratch buffer is assumed to be zero, but never cleared: the step passes with "
    "zeros in fresh memory"
)
_OTHER_ROWS = (
    "probably a race, an order that is not enforced, or memory that was never written: when it is run again without "
    "any change, other rows or heads are wrong"
)


def _with_other_fill(
    rerunner: Rerunner, finding: Finding, schedule: Schedule, comparison: Comparison, eager: Comparison | None
) -> tuple[Finding, str]:
    """Use another fill of fresh memory to distinguish unwritten output, a computed NaN, and reads of unwritten memory.

    Some CPU conversions give a NaN with all bits set, which is the poison. If fresh memory is not poisoned in an
    ordinary run, a wrong value may be an unwritten one: ``eager``, the same step on a fresh instance with poison, has
    the poison there.
    """
    observed, first = comparison.observed, comparison
    if not observed.replay and not comparison.unwritten.any() and eager is not None:
        first = eager
    if finding.check in _OF_NUMBERS and not first.unwritten.any():
        return finding, ""
    if observed.replay:
        answer = rerunner.graph(schedule, fill=OTHER_FILL)
        again = _evaluated(schedule, answer.replay_of(observed.step)) if answer else None
    else:
        again = _evaluated(schedule, rerunner.eager(schedule, observed.step, fill=OTHER_FILL))
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
        "numbers instead of NaN in fresh memory the result is finite"
    )


def _left_alone(first: Comparison, second: Comparison, fill: int) -> bool:
    """True if a row of a head holds the poison in one run and the byte ``fill`` at the same places in another.

    All poisoned elements of the row must hold it: a single number may have such bits by chance.
    """
    again = second.out.view(torch.uint8).reshape(*second.out.shape, -1)
    filled = (again == fill).all(-1)
    return bool((first.unwritten.any(-1) & (filled | ~first.unwritten).all(-1)).any())


_PADDED_ROWS_REACH_LIVE_ONES = (
    "data of padded rows reach real ones, by a sum, a maximum or a work list over all rows, or by offsets and counts "
    "of the padded batch"
)
_RIGHT_AS_SERVERS_PAD = (
    f"{_PADDED_ROWS_REACH_LIVE_ONES}: the step passes if padded rows hold what a server leaves in them"
)
_HEADLINE_ENDS = {
    "reads-own-kv": ": it read a slot of another owner",
    "reads-own-state": ": it read a slot of another owner, or that of a fresh request",
    "replay-follows-batch": " at a replay; eager mode is right",
    "padding-inert": "; without padded rows it is right",
    "buckets-independent": " after other replays; as the only one it is right",
    "steps-independent": ", after another step; on a fresh instance it is right",
    "captures-cleanly": ": it uses memory that was allocated in a capture",
    "addresses-stable": " at a replay, because planning replaced tensors that the graph reads",
    _RIGHT_AS_SERVERS_PAD: "; the step passes if padded rows hold what a server leaves in them",
    _NO_OTHER_INSTANCE: ", while a co-resident instance runs; without it, it is right",
    _NO_OTHER_WIDTH: ", on an instance of several widths; on one of its width it is right",
    _NO_OTHER_MODE: ", after a step of another mode; on a fresh instance it is right",
}
"""Reason, or check that diagnosis reports instead -> text that is appended to the headline of the wrong number."""


def _headline(finding: Finding, check: str, why: str, schedule: Schedule) -> str:
    of_check = "" if check == finding.check else _HEADLINE_ENDS.get(check, "")
    unread = family_of(schedule.case).unread
    if unread and why.startswith(_finite_with_numbers(unread)):
        of_check = f": it read {unread}"
    return finding.headline + _HEADLINE_ENDS.get(why, of_check)


def _blame_graph(rerunner: Rerunner, schedule: Schedule, step: Step) -> tuple[str, str]:
    """Return check and reason of a wrong replay whose eager run is right."""
    lone = rerunner.graph(schedule)
    if lone is not None and _right(_evaluated(schedule, lone.replay_of(step))):
        if shares_widths(schedule.case):
            return "buckets-independent", _NO_OTHER_WIDTH
        return (
            "buckets-independent",
            "the step is right when no other mode and no eager step uses the instance, and no co-resident instance "
            "runs",
        )
    if plans_overtake(schedule):
        waited = rerunner.graph(schedule, wait_before_plans=True)
        if waited is not None and _right(_evaluated(schedule, waited.replay_of(step))):
            return _NOTHING_ELSE, OVERTAKEN
    calm = rerunner.graph(schedule, poison_allocated=False)
    if calm is not None and calm.allocated_in_capture and _right(_evaluated(schedule, calm.replay_of(step))):
        first = calm.allocated_in_capture[0]
        return (
            "captures-cleanly",
            f"self.{first.path} was allocated while {first.where} was captured, and is read before it is written: "
            "allocate it in the constructor or in init_cuda_graph_state",
        )
    alone = rerunner.graph(lone_step(schedule, step, step.bucket))
    right_alone = alone is not None and _right(_evaluated(schedule, _last(alone)))
    if kept := _kept_between_replays(rerunner, schedule, step):
        return "buckets-independent" if right_alone else _NOTHING_ELSE, kept
    if right_alone:
        return "buckets-independent", _AS_THE_ONLY_REPLAY
    if alone is not None and alone.replaced and _reads_replaced(rerunner, schedule, step):
        names = ", ".join(f"self.{path}" for path in alone.replaced[:3])
        return "addresses-stable", f"init_forward_metadata_out_graph replaced {names} at a replay; fill it in place"
    least = least_bucket(schedule, step)
    if step.bucket > least:
        exact = rerunner.graph(lone_step(schedule, step, least))
        if exact is not None and _right(_evaluated(schedule, _last(exact))):
            return "padding-inert", f"{_PADDED_ROWS_REACH_LIVE_ONES}: the step passes in a bucket of exactly {least}"
    if rerunner.environment.emulated:
        in_order = rerunner.graph(schedule, programs_in_order=True)
        if in_order is not None and _right(_evaluated(schedule, in_order.replay_of(step))):
            return _NOTHING_ELSE, _ORDER_OF_PROGRAMS
    if step.padding != "prod" and step.tokens < step.bs * schedule.case.width:
        # Rows of rejected tokens are padding in a bucket of the right size too.
        calm = rerunner.graph(lone_step(schedule, replace(step, padding="prod"), step.bucket))
        if calm is not None and _right(_evaluated(schedule, _last(calm))):
            return (
                "padding-inert",
                f"{_PADDED_ROWS_REACH_LIVE_ONES}: the step passes if padded rows hold what a server leaves in them",
            )
    return _NOTHING_ELSE, reason_of_a_replay(rerunner, lone_step(schedule, step, step.bucket))


def _kept_between_replays(rerunner: Rerunner, schedule: Schedule, step: Step) -> str:
    """Hint for a replay that is right if the backend's own tensors are restored before each; else empty."""
    names = _to_restore(rerunner, schedule, lambda run: _right(_evaluated(schedule, run.replay_of(step))))
    if not names:
        return _shared_by_layers(rerunner, schedule)
    return (
        f"{_NOT_RESET}: the replay is right if {names} holds before each plan what it held before the first forward. "
        "Clear it in the graph, or in init_forward_metadata_out_graph"
    )


def _to_restore(rerunner: Rerunner, schedule: Schedule, is_right: Callable[[GraphRun], bool]) -> str:
    """Names of the tensors with which a run is right if they are restored before each replay; empty if it is wrong."""

    def right(only: str = "") -> tuple[str, ...]:
        run = rerunner.graph(schedule, restore_state=True, restore_only=only)
        if run is None or not is_right(run):
            return ()
        # The kit's own part of a backend makes its tensors again for each graph.
        return tuple(path for path in run.restored if not path.startswith("_kit_"))

    paths = right()
    tried = paths[:_MOST_TENSORS] if len(paths) > 1 else ()
    by_itself = next((path for path in tried if right(path)), "")
    return ", ".join(f"self.{path}" for path in ((by_itself,) if by_itself else paths[:_MOST_TENSORS]))


def _shared_by_layers(rerunner: Rerunner, schedule: Schedule) -> str:
    """Hint for a case that is right with one layer if tensors are restored before each replay, and wrong if they are
    not: in a graph of several layers the first layer leaves them changed for the next.
    """
    case = schedule.case
    if case.layers.count < 2 or case.layers.groups or case.layers.shapes or case.layers.hybrid or case.layers.varied:
        return ""
    other = case.with_changes(layers=replace(case.layers, count=1))
    if not rerunner.declared(other):
        return ""
    one = make_schedule(other, schedule.numerics)
    plain = rerunner.graph(one)
    names = "" if plain is None or _all_right(plain) else _to_restore(rerunner, one, _all_right)
    return names and (
        f"{_NOT_RESET}, and layers share it: with one layer each replay is right if {names} holds before each plan "
        "what it held before the first forward. Clear it in the graph before each launch, or let the last program do so"
    )


def _all_right(run: GraphRun) -> bool:
    return all(_right(_evaluated(schedule, observed)) for schedule, observed in run.observed)


_ORDER_OF_PROGRAMS = (
    "the result depends on the order in which the programs of a launch or the streams run: it is right in the order of "
    "eager runs, and wrong if the last program runs first and side streams are late. A device takes any order: "
    "do not rely on the order in which programs increment a counter: store each program's index explicitly, and "
    "make streams wait for each other"
)
_MOST_TENSORS = 3
"""Number of tensors that are restored one by one, and that a hint names."""
_NOT_RESET = "a counter, a flag or a scratch buffer is not reset between replays"
_AS_THE_ONLY_REPLAY = "the step is right as the only replay of the only bucket"
"""Reason if the replays before it are the cause."""
_OF_A_GRAPH = ("captures-cleanly", "addresses-stable", "padding-inert")
"""Checks that replays can prove without an eager run."""
_NOTHING_ELSE = "replay-follows-batch"
"""Check that remains for a replay that is also wrong by itself, and right in eager mode."""


def _blame_without_eager(
    rerunner: Rerunner, finding: Finding, why: str, schedule: Schedule, step: Step
) -> tuple[str, str]:
    """Return check and reason of a wrong replay of a mode that is declared only for graphs. ``why``: known reason."""
    check, cause = _blame_graph(rerunner, schedule, step)
    if check != _NOTHING_ELSE:
        return check, cause
    if finding.check == "finite" and not why:
        return _blame_nan(rerunner, schedule, step)
    return finding.check, why or (
        f"{schedule.case.mode} is declared only in graphs, so it is not known whether eager would be wrong too"
    )


def _reads_replaced(rerunner: Rerunner, schedule: Schedule, step: Step) -> bool:
    """True if the replay is right once the replaced tensors hold the values of their successors: a plan may replace its
    own tensors."""
    copied = rerunner.graph(lone_step(schedule, step, step.bucket), copy_into_replaced=True)
    return copied is None or _right(_evaluated(schedule, _last(copied)))


def _last(run: GraphRun) -> Observation | None:
    return run.observed[-1][1] if run.observed else None
