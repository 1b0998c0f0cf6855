"""What the judge makes of a drive: a right one is recorded once, and then handed over with one thing wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_testkit.runner_modes.messages import Described, Rerun, RunCase, RunRecord, StepRecord

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.checks import Stage
from attn_testkit.checks.observation import Copies
from attn_testkit.contract import Execution, Requires
from attn_testkit.environment import resolve
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.running.case_runs import evaluate
from attn_testkit.running.case_runs.case_run import CaseRun, request_to_isolate, schedule_for, schedules_of
from attn_testkit.running.case_runs.evaluate import _Outcome, evaluate_item
from attn_testkit.running.case_runs.worker_main import LocalWorker
from attn_testkit.running.planning.candidate import candidate_for
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.request import Item, Plan, Request
from attn_testkit.running.processes.worker_process import WorkerLost
from attn_testkit.steps.schedule import Schedule

CASE = "decode-gqa2x2-d32-fp32-p4-k3.9.6-shuffled-gauss-b4prod"
ONE = "decode-gqa2x2-d32-fp32-p4-k9-shuffled-gauss-b2prod"
SPEC = "attn_testkit.backends.torch_native:TorchNativeBackend"
EAGER, GRAPH = Execution.EAGER, Execution.GRAPH


def schedules() -> list[Schedule]:
    return schedules_of(parse_case(CASE), EAGER, Invariant.capabilities, resolve("cpu"))


Recorded = tuple[Described, RunRecord]


class Invariant(TorchNativeBackend):
    capabilities = TorchNativeBackend.capabilities.with_changes(promises={"batch_invariant": True})


@functools.cache
def recorded(case: str = CASE, execution: Execution = EAGER, invariant: bool = True) -> Recorded:
    worker = LocalWorker(candidate_for(Invariant if invariant else TorchNativeBackend, in_process=True), "cpu")
    return worker.described, worker.drive(RunCase(case, execution))


@functools.cache
def plan(case: str = CASE, execution: Execution = EAGER) -> Plan:
    request = Request((SPEC,), executions=(execution.value,), device="cpu", cases=(case,))
    return plan_run(request, lambda _: Invariant.capabilities)


def case_run(case: str, execution: Execution, *, probe: bool) -> CaseRun:
    return CaseRun(Item(SPEC, "decode", execution.value, case, probe), parse_case(case), execution)


def evaluated(found: Recorded, execution: Execution = EAGER, case: str = CASE, probe: bool = False) -> CaseResult:
    """The result of what was driven. Nothing that is asked afterwards is answered."""

    def drive(request: RunCase | Rerun) -> RunRecord:
        if isinstance(request, Rerun):
            raise WorkerLost(Status.CRASHED, "it died over the question")
        assert request == RunCase(case, execution)
        return found[1]

    return evaluate_item(drive, found[0], plan(case, execution), case_run(case, execution, probe=probe))


def with_copies(
    found: Recorded, number: int, change: Callable[[dict[tuple[str, str], torch.Tensor]], None]
) -> Recorded:
    """The same, and copies of one step changed in place."""
    old = found[1].records[number].copies
    new = Copies(old.flat.copy(), old.layout)
    change({(group, name): tensor for group, named in new.cut().items() for name, tensor in named.items()})
    return with_record(found, number, copies=new)


def with_record(found: Recorded, number: int, **changes: object) -> Recorded:
    records = list(found[1].records)
    records[number] = replace(records[number], **changes)  # type: ignore[arg-type]
    return with_run_record(found, records=tuple(records))


def flip(layer: str, row: int = 0) -> Callable[[dict[tuple[str, str], torch.Tensor]], None]:
    """Another last bit of one value."""

    def change(tensors: dict[tuple[str, str], torch.Tensor]) -> None:
        tensors["attention", layer].view(torch.int32).reshape(-1)[row * 128 + 5] ^= 1

    return change


def wrong(layer: str = "0") -> Callable[[dict[tuple[str, str], torch.Tensor]], None]:
    def change(tensors: dict[tuple[str, str], torch.Tensor]) -> None:
        tensors["attention", layer].reshape(-1)[5] += 1

    return change


def without(record: StepRecord, place: int) -> StepRecord:
    """The same where another record is taken out."""
    number = record.eager_run
    return replace(record, eager_run=None if number is None or number == place else number - (number > place))


def with_run_record(found: Recorded, **changes: object) -> Recorded:
    return found[0], replace(found[1], **changes)  # type: ignore[arg-type]


def checks(result: CaseResult) -> list[str]:
    return [finding.check for finding in result.findings]


@pytest.mark.parametrize("execution", [EAGER, GRAPH])
def test_a_right_drive_passes_and_says_how_near_the_limit_it_came(execution: Execution) -> None:
    found = recorded(CASE, execution)
    result = evaluated(found, execution)
    assert result.status is Status.PASSED
    assert (result.backend, result.mode, result.execution, result.case) == (SPEC, "decode", execution.value, CASE)
    assert result.margin is not None
    assert 0 < result.margin < 1
    assert result.findings == result.not_evaluated == result.hints == ()
    assert {"completes", "matches-oracle", "leaves-process-alone"} <= set(result.checks)
    assert ("padding-inert" in result.checks) is (execution is GRAPH)
    assert (result.device, result.graph) == ("emulated", "emulated" if execution is GRAPH else "")
    assert (result.kernels, result.reason) == ("real", "")
    assert result.seconds.keys() == {*found[1].seconds, "oracle and checks"}
    assert result.seconds["oracle and checks"] > 0
    assert all(value == round(value, 6) for value in result.seconds.values())


@pytest.mark.parametrize("execution", [EAGER, GRAPH])
@pytest.mark.parametrize("stage", [Stage.COMPLETED, Stage.REPLAYED])
def test_a_step_that_was_due_and_is_missing_is_no_pass(execution: Execution, stage: Stage) -> None:
    """Whichever it is, the eager steps between replays included."""
    found = recorded(CASE, execution)
    records, (schedule,) = found[1].records, schedules()
    names = [(record.step, record.replay) for record in records]
    assert len(records) > (3 if execution is EAGER else 8)
    for place, (name, replay) in enumerate(names):
        due = replay or execution is EAGER or schedule.step_named(name).eager_too
        if names.count((name, replay)) > 1 or not due:
            continue
        rest = [without(record, place) for record in records]
        del rest[place]
        if execution is EAGER:
            rest.insert(1, rest[0])  # what is compared with the first
        result = evaluated(with_run_record(found, records=tuple(rest), stage=int(stage)), execution)
        if stage is not Stage.COMPLETED:
            assert result.status is Status.PASSED, "it ended early, and a finding says why"
            continue
        assert checks(result)[:1] == ["completes"]
        assert result.findings[0].headline.endswith(f" did not run: {'replay of ' if replay else ''}{name}")
        assert result.findings[0].headline.startswith("1 expected steps did not run")


def test_of_many_missing_steps_three_are_named() -> None:
    found = recorded(CASE, GRAPH)
    result = evaluated(with_run_record(found, records=()), GRAPH)
    count = result.findings[0].headline.split(" ")[0]
    assert int(count) >= 9
    names = result.findings[0].headline.partition(": ")[2].split(", ")
    assert names[0] == "replay of step 0"
    assert len(names) == 3


def test_requests_in_other_company_are_due_only_where_batch_invariance_is_declared_and_there_is_company() -> None:
    for invariant, case, count in ((True, CASE, 5), (False, CASE, 3), (True, ONE, 3)):
        found = recorded(case, EAGER, invariant)
        assert len(found[1].records) == count
        assert evaluated(found, case=case).status is Status.PASSED
    found = recorded(CASE)
    declared = replace(found[0], declared=TorchNativeBackend.capabilities)
    assert evaluated((declared, with_run_record(found, records=found[1].records[:3])[1])).status is Status.PASSED


@pytest.mark.parametrize("layer", ["0", "1"])
def test_another_bit_the_second_time_is_found_in_every_layer_where_determinism_is_declared(layer: str) -> None:
    found = with_copies(recorded(), 1, flip(layer))
    result = evaluated(found)
    assert checks(result) == ["repeatable"]
    assert result.findings[0].where == f"layer {layer}: 1 of 384 values differ"
    undeclared = replace(found[0], declared=Invariant.capabilities.with_changes(promises={"deterministic": False}))
    assert evaluated((undeclared, *found[1:])).status is Status.PASSED


@pytest.mark.parametrize("layer", ["0", "1"])
def test_another_bit_without_company_is_found_in_every_layer(layer: str) -> None:
    result = evaluated(with_copies(recorded(), 3, flip(layer)))
    assert checks(result) == ["batch-invariant"]
    assert result.findings[0].where == f"layer {layer}: 1 of 128 values differ"


def test_another_bit_in_a_step_of_other_numbers_is_nobodys() -> None:
    assert evaluated(with_copies(recorded(), 2, flip("0"))).status is Status.PASSED


@pytest.mark.parametrize(("execution", "number"), [(EAGER, 0), (EAGER, 1), (EAGER, 2), (EAGER, 3), (GRAPH, 0)])
def test_a_wrong_number_in_any_step_fails_though_no_question_is_answered(execution: Execution, number: int) -> None:
    found = recorded(CASE, execution)
    bad = found[1].records[number]
    result = evaluated(with_copies(found, number, wrong()), execution)
    assert result.status is Status.FAILED
    assert result.findings[0].headline.startswith("request 0 differs from the oracle")
    assert result.findings[0].step == bad.label
    assert result.margin is not None
    assert 1 < result.margin <= 1e9
    assert "graph-matches-eager" not in result.checks


def test_a_number_that_is_wrong_beyond_measure_has_a_margin_that_a_record_can_hold() -> None:
    def infinite(tensors: dict[tuple[str, str], torch.Tensor]) -> None:
        tensors["attention", "1"].reshape(-1)[5] = torch.inf

    assert evaluated(with_copies(recorded(), 0, infinite)).margin == 1e9


def test_the_largest_margin_counts_and_not_the_last() -> None:
    right = evaluated(recorded()).margin
    first = evaluated(with_copies(recorded(), 0, wrong())).margin
    last = evaluated(with_copies(recorded(), 2, wrong())).margin
    assert right is not None
    assert first is not None
    assert last is not None
    assert min(first, last) > right


def test_a_lost_context_ends_the_run_of_the_case_and_is_not_asked_about() -> None:
    finding = Finding("completes", "it was lost")
    lost = with_run_record(
        recorded(), lost="device-side assert triggered", findings=(finding,), stage=int(Stage.OBSERVED)
    )
    result = evaluated(with_copies(lost, 0, wrong()))
    assert (result.status, result.reason) == (Status.CRASHED, "device-side assert triggered")
    assert checks(result)[0] == "completes"
    assert {"repeatable", "leaves-process-alone"} <= set(result.not_evaluated)


def test_a_finding_of_the_worker_fails_and_comes_first() -> None:
    finding = Finding("refuses-undeclared", "it took it")
    result = evaluated(with_copies(with_run_record(recorded(), findings=(finding,)), 1, flip("0")))
    assert checks(result) == ["refuses-undeclared", "repeatable"]
    assert result.findings[0] == finding


def test_nan_in_a_warm_up_is_reported_once_with_the_fill_value_unless_replays_show_it_too() -> None:
    found = with_run_record(recorded(CASE, GRAPH), not_finite_in_warm_up=(0, 0), fill=7)
    result = evaluated(found, GRAPH)
    assert checks(result) == ["finite"]
    assert result.findings[0].where == "bucket 2, every seq_lens at the fill value 7"
    at = next(i for i, record in enumerate(found[1].records) if record.replay)
    assert "the warm-up" not in " ".join(f.headline for f in evaluated(with_copies(found, at, wrong()), GRAPH).findings)
    assert evaluated(with_run_record(recorded(), not_finite_in_warm_up=(0,))).status is Status.PASSED


@pytest.mark.parametrize(
    ("variant", "fill", "reported"), [("", 1, True), ("-seq_lens_with_new", 2, False), ("-seq_lens_with_new", 3, True)]
)
def test_nan_in_a_warm_up_is_right_where_lengths_count_rows_and_the_fill_value_is_less(
    variant: str, fill: int, reported: bool
) -> None:
    case = f"target-verify-gqa2x2-d32-fp32-p4-k3.9.6-chain3-shuffled-gauss-b4prod{variant}"
    found = with_run_record(recorded(case, GRAPH), not_finite_in_warm_up=(0,), fill=fill)
    assert checks(evaluated(found, GRAPH, case)) == (["finite"] if reported else [])


def test_what_was_left_behind_is_reported_from_the_import_and_from_the_drive() -> None:
    described, *rest = with_run_record(recorded(), changed=("b", "c", "d", "e", "f"))
    (finding,) = evaluated((replace(described, changed=("a",)), *rest)).findings
    assert finding.check == "leaves-process-alone"
    assert finding.headline.endswith("did not restore it: a")
    assert finding.where.splitlines() == ["a", "b", "c", "d", "e"]
    assert evaluated(with_run_record(recorded(), changed=("b",))).status is Status.FAILED


def test_a_slot_that_is_wrong_in_one_step_is_found_there() -> None:
    def change(tensors: dict[tuple[str, str], torch.Tensor]) -> None:
        tensors["pool", "rows"].reshape(-1).view(torch.uint8)[-1] ^= 1

    for number in range(4):
        assert checks(evaluated(with_copies(recorded(), number, change))) == ["writes-own-kv"]


def test_a_step_that_there_is_not_is_no_step() -> None:
    with pytest.raises(KeyError):
        evaluated(with_record(recorded(), 0, step="step 99"))


def test_a_graph_that_works_and_is_not_declared_is_a_hint_and_no_more() -> None:
    eager, graph = recorded(), recorded(CASE, GRAPH)
    hint = f"{SPEC}: decode captures and replays correctly under a graph, but is not declared"
    at = next(i for i, record in enumerate(graph[1].records) if record.replay)
    lost = with_run_record(graph, lost="gone")
    raised = with_run_record(graph, findings=(Finding("completes", "it raised"),))

    def result(first: Recorded, second: Recorded, probe: bool) -> tuple[CaseResult, list[Execution]]:
        asked: list[Execution] = []

        def drive(request: RunCase | Rerun) -> RunRecord:
            if isinstance(request, Rerun):
                return RunRecord()
            asked.append(request.execution)
            return (first if request.execution is EAGER else second)[1]

        return evaluate_item(drive, eager[0], plan(), case_run(CASE, Execution.EAGER, probe=probe)), asked

    reported, asked = result(eager, graph, False)
    assert (reported.hints, reported.status, asked) == ((), Status.PASSED, [EAGER])
    reported, asked = result(eager, graph, True)
    assert (reported.hints, reported.status, reported.execution, asked) == (
        (hint,),
        Status.PASSED,
        "eager",
        [EAGER, GRAPH],
    )
    for other in (with_copies(graph, at, wrong()), lost, raised):
        reported, asked = result(eager, other, True)
        assert (reported.hints, reported.status, asked) == ((), Status.PASSED, [EAGER, GRAPH])
    reported, asked = result(with_copies(eager, 0, wrong()), graph, True)
    assert (reported.hints, reported.status, asked) == ((), Status.FAILED, [EAGER])


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of findings that are diagnosed; the diagnosis says ``explained``."""
    seen: list[str] = []

    def explain(rerunner: object, finding: Finding, *_: object) -> Finding:
        seen.append(finding.check)
        return replace(finding, hint="explained")

    monkeypatch.setattr(evaluate, "explain_numeric", explain)
    return seen


def outcome(*found: Finding, steps: bool = True) -> _Outcome:
    _, record = recorded()
    observed = evaluate._observations(record, schedules())
    named = [
        replace(observed[0], label=label) for label in ("replay 1 of 7", "replay 3 of 7", "eager", "replay 3 of 7")
    ]
    failed = {finding.check: named for finding in found} if steps else {}
    return _Outcome(record, observed, list(found), failed=failed)


def test_wrong_numbers_are_diagnosed_once_and_one_finding_a_check_is_kept(explained: list[str]) -> None:
    found = outcome(
        Finding("writes-own-kv", "a"), Finding("finite", "b"), Finding("matches-oracle", "c"), Finding("finite", "d")
    )
    reported = evaluate._explained(found, None, cause=True)  # type: ignore[arg-type]
    assert [(f.check, f.headline, f.hint) for f in reported] == [
        ("writes-own-kv", "a", ""),
        ("finite", "b", "explained"),
    ]
    assert explained == ["finite"]


def test_a_number_that_no_step_shows_is_not_diagnosed(explained: list[str]) -> None:
    found = outcome(Finding("finite", "the warm-up"), steps=False)
    reported = evaluate._explained(found, None, cause=True)  # type: ignore[arg-type]
    assert [f.headline for f in reported] == ["the warm-up"]
    assert explained == []


def test_other_replays_with_the_same_finding_are_named_once(explained: list[str]) -> None:
    found = outcome(Finding("mode-outputs", "a", step="replay 1 of 7"))
    (reported,) = evaluate._explained(found, None, cause=True)  # type: ignore[arg-type]
    assert reported.step == "replay 1 of 7; also in replay 3"
    finding = Finding("mode-outputs", "a", step="here")
    assert evaluate._with_other_steps(finding, ["replay 2 of 7 (x), bucket 4"]) == finding
    assert evaluate._with_other_steps(finding, ["here", "an eager step"]) == finding


def test_an_observation_has_what_its_record_says() -> None:
    _, record = recorded()
    first = replace(record.records[0], label="eager twin", ran_before="graphs")
    copies = record.records[1].copies
    second = StepRecord(0, "step 0", copies, "replay 2", "steps", ("a block",), replay=True, padded=3, eager_run=1)
    a, b = evaluate._observations(RunRecord(records=(second, first)), schedules())
    assert (a.label, a.ran_before, a.damaged, a.replay, a.padded) == ("replay 2", "steps", ("a block",), True, 3)
    assert (a.schedule, a.step, a.copies) == (schedules()[0], schedules()[0].steps[0], copies)
    assert a.eager_run is not None
    assert (a.eager_run.label, a.eager_run.copies) == ("eager twin", first.copies)
    assert b.eager_run is None


def test_a_stored_step_is_given_nan_for_keys_and_values_and_holds_them_already() -> None:
    (schedule,) = schedules()
    step = schedule.steps[0]
    plain = evaluate.step_inputs(schedule, step, Invariant.capabilities)
    stored = evaluate.step_inputs(schedule, replace(step, stored=True), Invariant.capabilities)
    assert not plain.data.k.isnan().any()
    assert not plain.data.v.isnan().any()
    assert stored.data.k.isnan().all()
    assert stored.data.v.isnan().all()
    assert plain.packed.shape == stored.packed.shape
    assert (len(plain.new_slots), len(stored.new_slots), stored.new_rows.shape[2]) == (step.tokens, 0, 0)
    own = plain.image(True)[:, :, plain.new_slots]
    assert torch.equal(own, plain.new_rows)
    assert plain.image(False)[:, :, plain.new_slots].isnan().all()
    assert torch.equal(stored.image(False)[:, :, plain.new_slots], own), "they are there already"
    tails = evaluate.step_inputs(
        schedule, step, Invariant.capabilities.with_changes(needs={"finite_page_tails": {"same"}})
    )
    assert tails.image(True).isnan().sum() < plain.image(True).isnan().sum()


# What is driven.


def test_what_a_drive_runs_beside_its_own_case_is_declared_and_can_run_here() -> None:
    here, mixed = resolve("cpu"), parse_case("decode-gqa2x2-d32-fp32-p4-k9.6-shuffled-gauss-b2prod-multi_mode")
    declared = Invariant.capabilities

    def modes(case: Case, execution: Execution = GRAPH, **changes: object) -> list[str]:
        found = schedules_of(case, execution, declared.with_changes(**changes), here)
        assert found[0].case == case
        return sorted(schedule.case.mode for schedule in found[1:])

    assert modes(mixed) == ["draft-decode", "draft-extend", "draft-extend-v2", "extend", "target-verify"]
    assert modes(mixed, EAGER) == modes(mixed)
    assert modes(mixed, EAGER, eager={"decode", "extend"}) == ["extend"]
    assert modes(parse_case(CASE)) == []
    assert modes(mixed, graph={"decode", "target-verify"}, eager=set()) == ["target-verify"]
    assert modes(mixed, graph={"decode"}, eager={"decode", "extend"}) == ["extend"], "eager steps between its replays"
    assert modes(mixed, requires=Requires(packages=("no-such-package",))) == []
    windowed = parse_case("decode-gqa2x2-d32-fp32-p4-k9.6-shuffled-gauss-w4-b2prod-multi_mode")

    def topk(case: Case, **changes: object) -> int:
        found = schedules_of(case, GRAPH, declared.with_changes(**changes), here)
        trees = [r.tree for s in found[1:] for step in s.steps for r in step.requests if r.tree is not None]
        return max(tree.topk for tree in trees)

    assert topk(mixed) > 1
    assert topk(windowed) > 1
    assert topk(mixed, windows={"in_trees": False}) > 1
    assert topk(windowed, windows={"in_trees": False}) == 1, "the window of a branching tree is not declared"


@pytest.mark.parametrize(("value", "place"), [(0, 1), (1, 3), (2, 0), (3, 4)])
def test_which_request_runs_by_itself(monkeypatch: pytest.MonkeyPatch, value: int, place: int) -> None:
    """The second longest, the shortest, the first, the last."""
    step = schedules()[0].steps[0]
    requests = tuple(replace(step.requests[0], slots=np.arange(n)) for n in (4, 6, 9, 2, 5))
    monkeypatch.setattr(Case, "derived", lambda self, name: value)
    assert request_to_isolate(parse_case(CASE), replace(step, requests=requests)) == place


def test_backends_that_round_alike_share_a_schedule() -> None:
    plain, fp8 = parse_case(CASE), parse_case(CASE.replace("fp32", "bf16").replace("gauss", "gauss-kvfp8e4m3"))
    declared = Invariant.capabilities
    rounds = declared.with_changes(precision={"matmul_dtype": "fp8_e4m3"})
    assert schedule_for(plain, declared) is schedule_for(plain, rounds)
    assert schedule_for(fp8, declared) is not schedule_for(fp8, rounds)
    assert schedule_for(fp8, rounds).matmul_dtype == "fp8_e4m3"
    assert schedule_for(fp8, declared).matmul_dtype == "model"


PROMPTS = "extend-gqa2x2-d32-fp32-p4-k3.9.6-n4a2.4.3-shuffled-gauss-b4prod"


class ModeInvariantInGraphs(TorchNativeBackend):
    capabilities = TorchNativeBackend.capabilities.with_changes(
        promises={"mode_invariant": True},
        eager={"extend", "decode"},
        graph={"extend", "decode"},
        bounds={"max_topk": 0},
    )


class ModeInvariantAlone(TorchNativeBackend):
    capabilities = TorchNativeBackend.capabilities.with_changes(
        promises={"mode_invariant": True}, eager={"extend"}, graph=()
    )


def evaluated_prompts(backend: type[TorchNativeBackend], left_out: Callable[[StepRecord], bool]) -> CaseResult:
    worker = LocalWorker(candidate_for(backend, in_process=True), "cpu")
    request = Request((SPEC,), executions=("eager",), device="cpu", cases=(PROMPTS,))
    made = plan_run(request, lambda _: backend.capabilities)

    def run(asked: RunCase | Rerun) -> RunRecord:
        record = worker.drive(asked)
        if not isinstance(asked, RunCase) or asked.execution is not EAGER:
            return record
        return replace(record, records=tuple(each for each in record.records if not left_out(each)))

    item = replace(made.items[0], probe=False)
    return evaluate_item(run, worker.described, made, CaseRun(item, parse_case(PROMPTS), EAGER))


def test_a_replay_of_last_rows_or_of_the_extend_that_is_missing_fails() -> None:
    for name in ("last rows", "last rows, padded", "step 0"):
        result = evaluated_prompts(ModeInvariantInGraphs, lambda each, name=name: each.replay and each.step == name)
        assert result.status is Status.FAILED
        assert result.findings[0].headline == f"1 expected steps did not run: replay of {name}"


def test_equal_bits_are_untested_if_there_is_no_other_mode() -> None:
    result = evaluated_prompts(ModeInvariantAlone, lambda each: False)
    assert (result.status, "mode-invariant" in result.checks) == (Status.PASSED, False)
    assert result.not_evaluated == ("mode-invariant",)
