"""Which check a wrong number really fails: each question is answered by hand, and the answers decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.graphs import AllocatedInCapture, GraphRun
from attn_testkit.runner_modes.messages import Rerun, RunRecord, StepRecord

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.contract import ForwardMode
from attn_testkit.diagnosis import questions, root_cause
from attn_testkit.diagnosis.lone_step import least_bucket
from attn_testkit.diagnosis.raised import OVERTAKEN
from attn_testkit.diagnosis.rerun import CLEAR, OTHER_FILL, POISON, Rerunner
from attn_testkit.diagnosis.root_cause import explain_numeric
from attn_testkit.environment import Environment
from attn_testkit.families.expected import expect
from attn_testkit.results.finding import Finding
from attn_testkit.steps.schedule import Schedule, Step, make_schedule

SCHEDULE = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k3.9.6-shuffled-gauss-b4prod"))
PADDED = next(step for step in SCHEDULE.steps if step.bucket > step.bs)
_FOLLOWS = "replay-follows-batch"
NAN = replace(PADDED, padding="nan")
FULL = next(step for step in SCHEDULE.steps if step.bucket == step.bs)


def seen(
    step: Step, value: object = "right", replay: bool = False, schedule: Schedule = SCHEDULE, **more: Any
) -> Observation:
    """A step with right numbers, or with one that is wrong."""
    out = expect(schedule, step).attention.float().clone()
    if value == "poison":
        out[0, 0, 0] = torch.full((1,), -1, dtype=torch.int32).view(torch.float32)
    elif value == "other fill":
        out[0, 0, 0] = torch.full((4,), OTHER_FILL, dtype=torch.uint8).view(torch.float32)
    elif value == "other row":
        out[0, -1, 0, 0] = 9.0
    elif value != "right":
        out[0, 0, 0, 0] = torch.nan if value == "nan" else 9.0
    copies = copies_of([("attention", str(i), each) for i, each in enumerate(out.unbind(0))])
    return Observation(schedule, step, "a step", copies, replay=replay, **more)


class Asked:
    """Answers by name: eager, waits, stored, zeros, fill, clear, graph, calm, alone, exact, served, copied, captured,
    in order, one layer, one layer restored."""

    grids: frozenset[tuple[str, tuple[int, ...]]] = frozenset()

    def __init__(self, step: Step, **answers: object) -> None:
        self.step, self.answers, self.questions = step, answers, list[str]()
        self.environment = Environment(emulated="in order" in answers)

    def runs_eagerly(self, schedule: Schedule) -> bool:
        return "graphs alone" not in self.answers

    def declared(self, case: Case) -> bool:
        return True

    def eager(
        self,
        schedule: Schedule,
        step: Step,
        *,
        unowned: Any = None,
        pattern: Any = None,
        wait_before_plans: bool = False,
        fill: int = POISON,
    ) -> Any:
        assert schedule is SCHEDULE
        if not self.runs_eagerly(schedule):
            return None
        name = "fill" if fill == OTHER_FILL else "zeros" if unowned == 0.0 else "eager"
        name = "clear" if fill == CLEAR else "waits" if wait_before_plans else name
        if name == "eager" and self.step.stored and not step.stored:
            name = "stored"
        return self._answer(name, lambda value: seen(self.step, value))

    def graph(
        self,
        schedule: Schedule,
        *,
        poison_allocated: bool = True,
        copy_into_replaced: bool = False,
        step_at_capture: bool = False,
        programs_in_order: bool = False,
        wait_before_plans: bool = False,
        fill: int = POISON,
        unowned: Any = None,
        restore_state: bool = False,
        **_: Any,
    ) -> Any:
        if schedule.case != SCHEDULE.case:
            assert schedule.case.layers.count == 1
            return self._one_layer(schedule, restore_state)
        only = schedule.steps[0] if schedule is not SCHEDULE else self.step
        name = "graph"
        if schedule is not SCHEDULE:
            assert len(schedule.steps) == 1
            assert schedule.buckets == (only.bucket,)
            name = "exact" if only.bucket == only.bs != self.step.bucket else "alone"
            name = "served" if only.padding != self.step.padding else name
        if not poison_allocated:
            name = "calm"
        if copy_into_replaced:
            name = "copied"
        if step_at_capture:
            assert schedule.buckets == (self.step.bucket,)
            name = "captured"
        if programs_in_order:
            name = "in order"
        if wait_before_plans:
            name = "waits"
        if fill == OTHER_FILL:
            name = "fill"
        if unowned == 0.0:
            name = "zeros"

        def run(value: object) -> GraphRun:
            allocated = (AllocatedInCapture("work.space", "bucket 4"),) if "calm allocated" in self.answers else ()
            replaced = ("a", "b", "c", "d") if name == "alone" and "copied" in self.answers else ()
            found = replace(seen(self.step, value, replay=True), step=only)
            seen_steps = ((schedule, found),) if value != "empty" else ()
            return GraphRun(seen_steps, 1, allocated_in_capture=allocated, replaced=replaced)

        return self._answer(name, run)

    def _one_layer(self, schedule: Schedule, restored: bool) -> Any:
        def run(value: object) -> GraphRun:
            replays = tuple((schedule, seen(each, value, True, schedule)) for each in schedule.steps)
            return GraphRun(replays, 1, restored=("work.count",) if restored else ())

        return self._answer("one layer restored" if restored else "one layer", run)

    def _answer(self, name: str, make: Callable[[object], Any]) -> Any:
        value = self.answers.get(name, "wrong")
        if name in self.questions:
            value = self.answers.get(f"{name} again", value)
        self.questions.append(name)
        return None if value is None else make(value)


@pytest.fixture(autouse=True)
def nothing_attended(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Whose keys and rows it was is another matter; how it was asked is kept."""
    kept: dict[str, Any] = {}

    def attended(rerunner: Any, schedule: Any, comparison: Any, *, in_graph: bool) -> None:
        kept["attended"] = in_graph

    def misrouted(rerunner: Any, schedule: Any, comparison: Any, *, in_graph: bool) -> tuple[Any, ...]:
        kept["swapped"] = None if rerunner is None else in_graph
        return ()

    def hints(evidence: Any) -> list[str]:
        kept["evidence"] = evidence
        return kept.get("hints", [])

    monkeypatch.setattr(questions, "find_attended", attended)
    monkeypatch.setattr(questions, "find_misrouted", misrouted)
    monkeypatch.setattr(questions, "hints", hints)
    return kept


def explained(
    check: str = "matches-oracle",
    step: Step = FULL,
    value: str = "wrong",
    ran_before: Any = "",
    replay: bool = False,
    **answers: object,
) -> tuple[Finding, list[str]]:
    finding = Finding(check, "request 0 is off", where="out[0] still holds the poison", step="here")
    if check == "output-written":
        finding = replace(finding, headline="request 0 has output that was never written")
    asked = Asked(step, **answers)
    found = explain_numeric(asked, finding, SCHEDULE, seen(step, value, replay, ran_before=ran_before), [])  # type: ignore[arg-type]
    return found, asked.questions


def test_a_first_step_that_is_not_wrong_every_time_is_said_to_be_a_race() -> None:
    assert explained(eager="right")[0].hint.endswith(
        "the step is right when it is run again on a fresh instance without any change"
    )
    assert explained(**{"eager again": "other row"})[0].hint.endswith(
        "when it is run again without any change, other rows or heads are wrong"
    )
    assert explained(**{"eager again": "nan"})[0].hint.endswith(
        "when it is run again without any change, other rows or heads are wrong"
    )
    assert explained()[0].hint == ""
    assert explained(**{"eager again": None})[0].hint == "", "it raised"
    assert "run again" not in explained(ran_before="steps", eager="right")[0].hint
    assert explained(ran_before="steps", **{"eager again": "other row"})[0].hint == ""
    assert "run again" not in explained(replay=True, eager="right")[0].hint


def test_a_first_step_that_is_right_with_zeros_in_fresh_memory_takes_something_for_cleared() -> None:
    said = "a counter, flag"
    assert explained(clear="right")[0].hint.startswith(said)
    assert explained("output-written", value="poison", clear="right", fill="other fill")[0].hint.startswith(said)
    assert explained(clear="other row")[0].hint == ""
    assert explained(clear=None)[0].hint == "", "it raised"
    assert explained(ran_before="steps", clear="right")[0].hint == "", "steps before it may have cleared it"
    assert "zeros in fresh" not in explained(clear="right", eager="right")[0].hint, "it is no matter of memory"
    assert "clear" not in explained(replay=True, clear="right")[1]


REPLAYS: list[tuple[str, Step, dict[str, object], str, str, str]] = [
    (
        "alone on the instance",
        FULL,
        {"graph": "right"},
        "buckets-independent",
        "after other replays; as the only one it is right",
        "no other mode",
    ),
    (
        "born in a capture",
        FULL,
        {"calm": "right", "calm allocated": 1},
        "captures-cleanly",
        "allocated in a capture",
        "self.work.space was allocated while bucket 4",
    ),
    (
        "right without poison, nothing born",
        FULL,
        {"calm": "right"},
        "replay-follows-batch",
        "at a replay; eager mode is right",
        "only the graph is wrong, even if it is captured with this batch",
    ),
    (
        "born, and still wrong",
        FULL,
        {"calm allocated": 1},
        "replay-follows-batch",
        "at a replay",
        "only the graph is wrong, even if it is captured with this batch",
    ),
    (
        "the only replay",
        FULL,
        {"alone": "right"},
        "buckets-independent",
        "as the only one it is right",
        "as the only replay of the only bucket",
    ),
    (
        "replaced",
        FULL,
        {"copied": "right"},
        "addresses-stable",
        "because planning replaced tensors",
        "replaced self.a, self.b, self.c at a",
    ),
    (
        "replaced, no answer",
        FULL,
        {"copied": None},
        "addresses-stable",
        "because planning replaced tensors",
        "fill it in place",
    ),
    (
        "replaced, and still wrong",
        FULL,
        {"copied": "wrong"},
        "replay-follows-batch",
        "at a replay",
        "only the graph is wrong, even if it is captured with this batch",
    ),
    (
        "padding",
        PADDED,
        {"exact": "right"},
        "padding-inert",
        "without padded rows it is right",
        f"the step passes in a bucket of exactly {PADDED.bs}",
    ),
    ("padding that a bucket leaves out", NAN, {"served": "right"}, "replay-follows-batch", "at a replay", "even if"),
    ("padding, and still wrong", PADDED, {}, "replay-follows-batch", "at a replay", "even if it is captured with"),
    (
        "padding, no answer",
        PADDED,
        {"exact": None},
        "replay-follows-batch",
        "at a replay",
        "even if it is captured with",
    ),
    (
        "captured with it",
        PADDED,
        {"captured": "right"},
        "replay-follows-batch",
        "at a replay",
        "with this batch, it is",
    ),
    (
        "in the order of programs",
        FULL,
        {"in order": "right", "captured": "right"},
        "replay-follows-batch",
        "at a replay",
        "order in which the programs of a launch or the streams run",
    ),
    (
        "not in the order of programs",
        FULL,
        {"in order": "wrong", "captured": "right"},
        "replay-follows-batch",
        "at a replay",
        "with this batch, it is",
    ),
    (
        "not captured with it",
        FULL,
        {"captured": None},
        "replay-follows-batch",
        "at a replay",
        "wrong: probably a value",
    ),
    ("no replay of it", FULL, {"captured": "empty"}, "replay-follows-batch", "at a replay", "wrong: probably a value"),
    (
        "no answers",
        PADDED,
        {"graph": None, "calm": None, "alone": None},
        "replay-follows-batch",
        "at a replay",
        "only the graph is wrong, even if",
    ),
    ("no replays", FULL, {"alone": "empty"}, "replay-follows-batch", "at a replay", "even if it is captured with"),
    ("wrong in eager too", FULL, {"eager": "wrong", "graph": "right"}, "matches-oracle", "request 0 is off", ""),
    ("no eager run", FULL, {"eager": None, "graph": "right"}, "matches-oracle", "request 0 is off", ""),
]


def test_the_least_bucket_holds_the_requests_and_their_rows() -> None:
    assert [least_bucket(SCHEDULE, step) for step in SCHEDULE.steps] == [step.bs for step in SCHEDULE.steps]
    extend = make_schedule(parse_case("extend-gqa2x2-d32-fp32-p4-k3.9-n4a8.1-shuffled-gauss-b5prod"))
    for step in extend.steps:
        least = least_bucket(extend, step)
        assert step.bs <= least <= step.bucket
        assert (least - 1) * 4 < step.tokens <= least * 4 or least == step.bs
    assert least_bucket(extend, extend.steps[0]) == 3


@pytest.mark.parametrize(
    ("step", "answers", "check", "headline", "hint"), [r[1:] for r in REPLAYS], ids=[r[0] for r in REPLAYS]
)
def test_a_wrong_replay_is_blamed_on_what_makes_it_right(
    nothing_attended: dict[str, Any], step: Step, answers: dict[str, object], check: str, headline: str, hint: str
) -> None:
    nothing_attended["hints"] = ["a pattern of the keys"]
    found, questions = explained(step=step, replay=True, **{"eager": "right", **answers})
    assert found.check == check
    says_it_all = check in ("addresses-stable", "captures-cleanly", "padding-inert")
    assert ("a pattern of the keys" in found.hint) is not says_it_all
    assert headline in found.headline
    assert found.hint.startswith(hint) or hint in found.hint
    assert ("exact" in questions) is (step.bs < step.bucket)
    in_graph = answers.get("eager", "right") == "right"
    by_itself = check == "buckets-independent"
    assert nothing_attended.get("attended") == (None if by_itself else in_graph)
    assert nothing_attended["swapped"] == (None if by_itself else in_graph)
    assert nothing_attended["evidence"].in_graph is (in_graph and not by_itself)
    assert nothing_attended["evidence"].right_when_alone is (hint == "as the only replay of the only bucket")
    assert not nothing_attended["evidence"].computes_nan


def test_layers_share_a_counter_if_with_one_layer_replays_are_right_once_it_is_restored() -> None:
    said = "and layers share it: with one layer each replay is right if self.work.count holds"
    found, _ = explained(replay=True, eager="right", **{"one layer restored": "right"})
    assert (found.check, said in found.hint) == ("replay-follows-batch", True)
    for plain, restored in (("right", "right"), (None, "right"), ("wrong", None), ("wrong", "wrong")):
        found, _ = explained(replay=True, eager="right", **{"one layer": plain, "one layer restored": restored})
        assert said not in found.hint


@pytest.mark.parametrize(("replay", "eager", "found"), [(False, "wrong", "finite"), (True, "right", _FOLLOWS)])
def test_a_step_that_is_right_if_the_host_waits_before_the_next_plan_was_overtaken(
    replay: bool, eager: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU such a replay was once said not to reset a counter: restoring tensors waits for the device, too."""
    restored = {"one layer restored": "right", "zeros": "right"}
    asked = {"check": "finite", "value": "nan", "replay": replay, "eager": eager, **restored}
    assert "waits" not in explained(**asked, waits="right")[1], "no plan is made ahead in this case"
    monkeypatch.setattr(root_cause, "plans_overtake", lambda schedule: True)
    finding, questions = explained(**asked, waits="right")
    assert (finding.check, finding.hint) == (found, OVERTAKEN)
    assert not {"calm", "zeros", "one layer restored"} & set(questions)
    for answer in ("wrong", "nan", None):
        assert OVERTAKEN not in explained(**asked, waits=answer)[0].hint


@pytest.mark.parametrize(
    ("ran_before", "eager", "check", "headline"),
    [
        ("steps", "right", "steps-independent", ", after another step; on a fresh instance it is right"),
        ("graphs", "right", "buckets-independent", " after other replays; as the only one it is right"),
        ("instances", "right", "steps-independent", ", while a co-resident instance runs; without it, it is right"),
        ("steps", "wrong", "matches-oracle", ""),
        ("instances", "wrong", "matches-oracle", ""),
        ("", "right", "matches-oracle", ""),
    ],
)
def test_an_eager_step_that_is_right_on_a_fresh_instance(
    nothing_attended: dict[str, Any], ran_before: str, eager: str, check: str, headline: str
) -> None:
    found, _ = explained(ran_before=ran_before, eager=eager)
    assert (found.check, found.headline) == (check, f"request 0 is off{headline}")
    assert nothing_attended["evidence"].right_when_fresh is (check == "steps-independent")
    assert nothing_attended["evidence"].reads_foreign is False


STORED = replace(FULL, stored=True)
FINITE = "with zeros instead of NaN in unowned slots the result is finite"


@pytest.mark.parametrize(
    ("step", "answers", "check", "hint"),
    [
        (
            FULL,
            {"zeros": "right"},
            "reads-own-kv",
            "with zeros instead of NaN in unowned slots the result is finite, and right",
        ),
        (FULL, {"zeros": "wrong"}, "reads-own-kv", "with zeros instead of NaN"),
        (FULL, {"zeros": "nan"}, "finite", ""),
        (FULL, {"zeros": None}, "finite", ""),
        (STORED, {"stored": "right"}, "finite", "with save_kv_cache=False k and v hold NaN"),
        (STORED, {"stored": "wrong", "zeros": "right"}, "reads-own-kv", "with zeros"),
        (STORED, {"stored": "wrong", "zeros": "nan"}, "finite", "with save_kv_cache=False k and v hold NaN"),
        (STORED, {"stored": "nan", "zeros": "nan"}, "finite", ""),
        (FULL, {"stored": "right", "zeros": "nan"}, "finite", ""),
    ],
)
def test_a_nan_was_read_somewhere(
    nothing_attended: dict[str, Any], step: Step, answers: dict[str, object], check: str, hint: str
) -> None:
    found, _ = explained("finite", step, "nan", eager="nan", fill="nan", **answers)
    assert found.check == check
    assert found.hint.startswith(hint)
    assert bool(found.hint) is bool(hint)
    assert (": it read a slot of another owner" in found.headline) is (check == "reads-own-kv")
    assert nothing_attended["evidence"].reads_foreign is (check == "reads-own-kv")
    assert nothing_attended["evidence"].right_with_zeros is (check == "reads-own-kv" and answers["zeros"] == "right")
    assert nothing_attended["evidence"].computes_nan is (check == "finite" and not hint)


@pytest.mark.parametrize(
    ("zeros", "hints", "lines"),
    [
        ("wrong", ["a", "b", "c"], ["a", "b", FINITE]),
        ("wrong", ["a"], ["a", FINITE]),
        ("right", ["a", "b", "c"], ["a", "b", f"{FINITE}, and right"]),
        ("right", [], [f"{FINITE}, and right"]),
    ],
)
def test_where_a_foreign_slot_was_met_stands_before_that_it_holds_nan(
    nothing_attended: dict[str, Any], zeros: str, hints: list[str], lines: list[str]
) -> None:
    nothing_attended["hints"] = hints
    found, _ = explained("finite", FULL, "nan", eager="nan", fill="nan", zeros=zeros)
    assert found.hint.split("\n") == lines


def test_a_nan_that_goes_with_another_fill_was_read_from_memory_that_nobody_wrote() -> None:
    found, questions = explained("finite", value="nan", eager="nan", fill="right")
    assert found.check == "finite"
    assert found.hint.endswith("with numbers instead of NaN in fresh memory the result is finite")
    assert "zeros" not in questions
    found, questions = explained("finite", value="nan", eager="right", fill="right", replay=True)
    assert "fill" in questions


def test_what_stays_poison_with_another_fill_was_not_written_and_what_does_not_was_computed() -> None:
    found, _ = explained("output-written", value="poison", eager="poison", fill="other fill")
    assert (found.check, found.step) == ("output-written", "here")
    assert found.headline == "request 0 has output that was never written"
    computed, _ = explained("output-written", value="poison", eager="poison", fill="nan", zeros="nan")
    assert (computed.check, computed.headline) == ("finite", "request 0 has nan in its output")
    assert computed.where == "out[0] is nan"
    unknown, _ = explained("output-written", value="poison", eager="poison", fill=None)
    assert unknown.check == "output-written"


def test_a_wrong_number_where_a_fresh_instance_leaves_poison_was_not_written() -> None:
    found, _ = explained(value="wrong", eager="poison", fill="other fill")
    assert found.check == "output-written"
    found, questions = explained(value="wrong", eager="poison", fill="right")
    assert found.check == "matches-oracle"
    assert "fill" in questions
    assert "fill" not in explained(value="wrong", eager="wrong")[1], "nothing holds poison"
    assert "fill" not in explained(value="wrong", eager=None)[1]
    assert "fill" not in explained(value="wrong", eager="poison", replay=True)[1], "the graph is what is wrong"


def test_three_lines_of_hints_are_enough(nothing_attended: dict[str, Any]) -> None:
    nothing_attended["hints"] = ["a", "b", "c"]
    assert explained()[0].hint == "a\nb\nc"
    assert explained(ran_before="steps", eager="right")[0].hint.splitlines()[1:] == ["a", "b"]


def test_one_number_that_has_the_fills_bits_by_chance_is_not_left_alone() -> None:
    def evaluated(*values: str) -> Comparison:
        return Comparison(seen(FULL, values[0]), expect(SCHEDULE, FULL))

    poison, filled = evaluated("poison"), evaluated("other fill")
    assert root_cause._left_alone(poison, filled, OTHER_FILL)
    assert not root_cause._left_alone(poison, filled, POISON)
    assert not root_cause._left_alone(evaluated("right"), filled, OTHER_FILL)
    filled.out[0, 0, 0, 3] = 1.0
    assert not root_cause._left_alone(poison, filled, OTHER_FILL)


# A mode that is declared in graphs alone.


@pytest.mark.parametrize(
    ("check", "value", "answers", "found", "hint"),
    [
        (
            "matches-oracle",
            "wrong",
            {},
            "matches-oracle",
            "decode is declared only in graphs, so it is not known whether",
        ),
        ("matches-oracle", "wrong", {"graph": "right"}, "buckets-independent", "no other mode"),
        ("matches-oracle", "wrong", {"alone": "right"}, "buckets-independent", "as the only replay"),
        ("matches-oracle", "wrong", {"exact": "right"}, "padding-inert", "in a bucket of exactly"),
        ("finite", "nan", {"fill": "nan", "zeros": "right"}, "reads-own-kv", "with zeros instead of NaN"),
        ("finite", "nan", {"fill": "nan", "zeros": "nan"}, "finite", ""),
        ("finite", "nan", {"fill": "nan", "zeros": None}, "finite", ""),
        ("finite", "nan", {"fill": "right"}, "finite", "it reads memory that was never written"),
    ],
)
def test_without_an_eager_run_a_replay_is_blamed_on_what_replays_alone_show(
    nothing_attended: dict[str, Any], check: str, value: str, answers: dict[str, object], found: str, hint: str
) -> None:
    finding, questions = explained(check, PADDED, value, replay=True, **{"graphs alone": True, **answers})
    assert finding.check == found
    assert hint in finding.hint if hint else not finding.hint
    assert "only the graph is wrong" not in finding.hint
    assert not {"eager", "stored"} & set(questions)
    assert nothing_attended["swapped"] is (None if found == "buckets-independent" else True)
    assert nothing_attended["evidence"].in_graph is (found == "padding-inert")


# What is asked of a worker.


def test_a_question_travels_whole_and_its_answer_is_found_by_step() -> None:
    requests: list[Rerun] = []

    def drive(request: Rerun) -> RunRecord:
        requests.append(request)
        replay = request.step is None
        record = StepRecord(0, FULL.name, seen(FULL).copies, "replay", "graphs", ("a block",), replay, padded=2)
        return RunRecord((record,), fill=7, allocated_in_capture=(("a", "b"),), replaced=("c",))

    rerunner = Rerunner(drive, None)  # type: ignore[arg-type]
    one = rerunner.eager(SCHEDULE, FULL, unowned=0.0, pattern="gauss", fill=3)
    assert one is not None
    assert one.step is FULL
    assert (requests[0].step, requests[0].unowned, requests[0].fill, requests[0].options.pattern) == (
        FULL,
        0.0,
        3,
        "gauss",
    )
    run = rerunner.graph(SCHEDULE, unowned=1.0, pattern="mean", poison_allocated=False, copy_into_replaced=True, fill=4)
    assert run is not None
    assert (run.fill, run.replaced, run.allocated_in_capture) == (7, ("c",), (AllocatedInCapture("a", "b"),))
    found = run.replay_of(FULL)
    assert found is not None
    assert (found.label, found.ran_before, found.damaged, found.padded, found.schedule) == (
        "replay",
        "graphs",
        ("a block",),
        2,
        SCHEDULE,
    )
    options = requests[1].options
    assert (requests[1].step, requests[1].unowned, requests[1].fill) == (None, 1.0, 4)
    assert (options.pattern, options.poison_allocated, options.copy_into_replaced) == ("mean", False, True)
    assert (options.watch_replaced, options.eager_steps) == (True, False)
    rerunner.graph(SCHEDULE)
    plain = requests[2]
    assert (plain.unowned, plain.fill, plain.options.poison_allocated, plain.options.copy_into_replaced) == (
        None,
        0xFF,
        True,
        False,
    )
    asked, alone = len(requests), Rerunner(drive, None, frozenset({ForwardMode.EXTEND}))  # type: ignore[arg-type]
    assert not alone.runs_eagerly(SCHEDULE)
    assert alone.eager(SCHEDULE, FULL) is None
    assert len(requests) == asked, "nothing of the mode runs eagerly"
    assert alone.graph(SCHEDULE) is not None
    silent = Rerunner(lambda *_: RunRecord(), None)  # type: ignore[arg-type]
    assert silent.eager(SCHEDULE, FULL) is None
    assert silent.graph(SCHEDULE) is None
