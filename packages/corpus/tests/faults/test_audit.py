"""The audit: what makes it fail, and what it says."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import plan_run

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import CHECKS
from attn_testkit.cli import main
from attn_testkit.contract import BackendContext, Execution, ForwardMode
from attn_testkit.examples.off_by_one import OffByOneBackend
from attn_testkit.registry import UsageError
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Item, Options
from attn_testkit_corpus.audit import Audit, Settings, audit
from attn_testkit_corpus.audit.show import audit_page, audit_text
from attn_testkit_corpus.audit.tasks import kill_order, run_task, tasks_for
from attn_testkit_corpus.audit.verdicts import AdversarialVerdict, ControlVerdict, FaultVerdict, Task, caught_before
from attn_testkit_corpus.faults import all_controls, all_faults, catalogue
from attn_testkit_corpus.faults.catalogue import CorpusEntry
from attn_testkit_corpus.faults.parent import PlannedBackend


class AssertingBackend(PlannedBackend):
    """Its constructor says what torch says once a kernel has failed on the device."""

    def __init__(self, context: BackendContext) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.fixture
def planted() -> Iterator[None]:
    """Faults and controls that are none, in the catalogue for a while."""
    kept = all_faults(), all_controls()
    for slug, backend in (("healthy", PlannedBackend), ("asserting", AssertingBackend)):
        catalogue._CORPUS[slug] = CorpusEntry(
            "fault", slug, backend, "nobody", (ForwardMode.DECODE,), (Execution.EAGER,), ("matches-oracle",)
        )
    for slug, backend in (("broken", OffByOneBackend), ("asserting-control", AssertingBackend)):
        catalogue._CORPUS[slug] = CorpusEntry(
            "control", slug, backend, "", tuple(ForwardMode), tuple(Execution), healthy=backend
        )
    all_faults.cache_clear()
    all_controls.cache_clear()
    yield
    for slug in ("healthy", "asserting", "broken", "asserting-control"):
        del catalogue._CORPUS[slug]
    all_faults.cache_clear()
    all_controls.cache_clear()
    assert (all_faults(), all_controls()) == kept


def verdicts(**missing: str) -> Audit:
    """An audit in which every check alone catches a fault, but for those named."""
    found = Audit(Settings())
    for check in CHECKS:
        caught = () if check in missing.values() else (check,)
        found.faults.append(FaultVerdict(f"breaks-{check}", "A", "general", (check,), caught, text=check))
    return found


def test_everything_caught_and_no_alarm_is_good() -> None:
    assert verdicts().exit_code == 0
    assert audit_text(verdicts()).splitlines()[-1].startswith("GOOD: ")


def test_a_control_counts_once_however_many_modes_of_it_ran_and_alone_it_has_no_matrix() -> None:
    found = Audit(Settings(faults=("control",)))
    found.controls += [ControlVerdict("control", mode, "graph", 10) for mode in ("decode", "draft-extend")]
    (line,) = audit_text(found).splitlines()
    assert "0 false alarms in 1 healthy controls; 20 case-runs" in line


def test_a_survivor_an_alarm_and_an_idle_check_each_fail_the_audit() -> None:
    survived = verdicts(check="finite")
    assert survived.exit_code == 1
    assert audit_text(survived).startswith("SURVIVED  breaks-finite")
    alarmed = verdicts()
    alarmed.controls.append(ControlVerdict("control", "decode", "graph", 10, 1, ("a text",)))
    assert alarmed.exit_code == 1
    assert audit_text(alarmed).startswith("FALSE ALARM  control decode graph: 1 of 10")
    idle = verdicts()
    idle.faults[0] = FaultVerdict("both", "A", "general", ("completes",), ("completes", "finite"))
    assert idle.first_catches["completes"] == 1
    assert idle.idle_checks == ["completes"]
    assert audit_text(idle).splitlines()[-1].startswith("NOT GOOD: ")
    assert idle.exit_code == 1
    assert Audit(Settings()).exit_code == 5


def test_a_healthy_fault_survives_and_a_broken_control_alarms(planted: None) -> None:
    survived = audit(Settings(tier="smoke", device="cpu", faults=("healthy",), jobs=1))
    assert [verdict.slug for verdict in survived.survivors] == ["healthy"]
    assert survived.faults[0].case_runs > 3
    assert survived.exit_code == 1
    control = run_task(Task("control", "broken", "decode", "eager"), Settings(tier="smoke", device="cpu"), in_process())
    assert isinstance(control, ControlVerdict)
    assert control.alarms
    assert "differs from the oracle" in control.texts[0]


def in_process() -> Runner:
    return Runner(Options(in_process=True))


def test_after_a_lost_device_context_a_control_is_not_tried_further_and_the_next_task_is_evaluated_for_itself(
    planted: None,
) -> None:
    fault = run_task(Task("fault", "asserting"), Settings(device="cpu"), in_process())
    assert isinstance(fault, FaultVerdict)
    assert fault.caught_by == ("completes",)
    control = run_task(Task("control", "asserting-control", "decode", "eager"), Settings(device="cpu"), in_process())
    assert isinstance(control, ControlVerdict)
    assert control.alarms == 1, "what comes after a lost context is not tried"
    settings = Settings(device="cpu", tier="smoke")
    ordinary = run_task(Task("control", "broken", "decode", "eager"), settings, in_process())
    assert isinstance(ordinary, ControlVerdict)
    assert ordinary.alarms > 1


def test_faults_and_controls_run_in_processes_and_the_record_and_the_page_show_them(tmp_path: Path) -> None:
    files = [str(tmp_path / "audit.json"), str(tmp_path / "audit.html")]
    chosen = ["--fault", "draft-extend-qlens-seeded-once", "--fault", "query-scaled-in-place"]
    code = main(["audit", "--device", "cpu", "--jobs", "2", "--json", files[0], "--html", files[1], *chosen])
    assert code == 0
    record = json.loads(Path(files[0]).read_text())
    assert [fault["slug"] for fault in record["faults"]] == ["draft-extend-qlens-seeded-once", "query-scaled-in-place"]
    assert record["faults"][0]["caught_by"] == ["replay-follows-batch"]
    assert record["idle_checks"] == record["controls"] == []
    assert "accepted counts are" in record["faults"][0]["text"]
    page = Path(files[1]).read_text()
    assert "rows are packed" in " ".join(page.split())
    assert "http" not in page.replace("http-equiv", ""), "a page needs nothing else"


def test_field_bugs_of_a_folder_run_with_their_parents_on_the_case_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = Path(__file__).parents[1] / "field_bugs", tmp_path / "audit.html"
    asked = ["audit", "--device", "cpu", "--jobs", "1", "--fault", "field-window-one-more"]
    assert main([*asked, "--field-bugs", str(folder), "--html", str(page)]) == 0
    assert "1 of 1 faults caught; 0 false alarms in 1 healthy controls; 2 case-runs" in capsys.readouterr().out
    assert "field bugs · 1" in page.read_text()
    assert main([*asked, "--field-bugs", str(tmp_path)]) == 4
    assert "no fault matches" in capsys.readouterr().err
    assert main(["audit", "--device", "cpu", "--class", "?"]) == 4
    assert "no fault matches ?; the classes are ABC" in capsys.readouterr().err


def test_a_wrong_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(UsageError, match="qlens-packed-vs-uniform-stride"):
        audit(Settings(faults=("qlens-packed-vs-uniform-strid",), device="cpu"))


def test_eager_cases_come_before_dear_graph_cases_and_every_mode_gets_its_turn() -> None:
    plan = plan_run(backends=["attn_testkit_corpus.faults.parent:PlannedBackend"], device="cpu")
    order = kill_order(plan.items)
    assert sorted(map(id, order)) == sorted(map(id, plan.items))
    first = order[:12]
    assert {item.mode for item in first} == {item.mode for item in plan.items} >= {"decode", "extend"}
    assert sum(item.execution == Execution.GRAPH for item in first) <= len(ForwardMode)


def test_what_the_covering_array_leaves_out_takes_turns_with_it() -> None:
    named = [f"decode-mha2-d64-bf16-p{page}-k21.3-shuffled-gauss-b2prod" for page in range(1, 17)]
    items = [Item("a", "decode", "eager", case) for case in named if not parse_case(case).inference_mode]
    assert len(items) > 3
    order = kill_order(items)
    assert order[:4] == [items[0], items[-1], items[1], items[-2]]
    assert sorted(map(id, order)) == sorted(map(id, items))


def test_what_caught_a_fault_before_is_tried_first_on_it(tmp_path: Path) -> None:
    plan = plan_run(backends=["attn_testkit_corpus.faults.parent:PlannedBackend"], device="cpu")
    usual = kill_order(plan.items)
    last = usual[-1]
    first = kill_order(plan.items, (last.execution, last.case))
    assert first == [last, *usual[:-1]]
    assert kill_order(plan.items, ("eager", "a case that is gone")) == usual
    record = tmp_path / "audit.json"
    seen = FaultVerdict("stale", "A", "general", ("finite",), ("finite",), last.case, last.mode, last.execution)
    record.write_text(json.dumps(Audit(Settings(), [seen, replace(seen, slug="survived", case="")]).as_plain()))
    assert caught_before(str(record)) == {"stale": (last.execution, last.case)}


def test_an_earlier_audit_that_cannot_be_read_is_said_so_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json: No such file"):
        caught_before(str(tmp_path / "none.json"))
    for text in ("{", "[]", '{"faults": [{"slug": "a"}]}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(UsageError, match="is not a record of an audit"):
            caught_before(str(tmp_path / "other.json"))


def test_tasks_that_share_cases_follow_each_other_and_faults_come_last() -> None:
    tasks = tasks_for(Settings())
    controls = [task for task in tasks if task.kind == "control"]
    assert tasks[: len(controls)] == controls
    assert [(task.mode, task.name) for task in controls] == sorted((task.mode, task.name) for task in controls)


def test_the_page_of_an_audit_shows_survivors_first() -> None:
    found = Audit(Settings())
    entry = all_faults()[0]
    found.faults.append(FaultVerdict(entry.slug, entry.bug_class, entry.source, entry.checks, case_runs=7))
    page = audit_page(found)
    assert page.index("Survivors") < page.index("Kill matrix")
    assert "7 case-runs passed" in page


def test_an_audit_of_adversarial_backends_alone_speaks_of_them_alone() -> None:
    found = Audit(Settings())
    found.adversarial.append(
        AdversarialVerdict("prints-a-verdict", "It prints CONFORMANT.", 0, "passed", 1, "failed: finite")
    )
    page, text = audit_page(found), audit_text(found)
    for said in ("prints-a-verdict", "It prints CONFORMANT.", "failed: finite"):
        assert said in page or said in text
    assert page.count("bad-number") >= 2, "a green, and an honest one that fails"
    assert "faults caught" not in text
    assert "adversarial backends: 0 of 1 failed" in text


def test_classes_choose_faults_without_controls() -> None:
    tasks = tasks_for(Settings(classes="nk"))
    kinds = {fault.slug: fault.bug_class for fault in all_faults()}
    assert {kinds[task.name] for task in tasks} == {"N", "K"}
    assert all(task.kind == "fault" for task in tasks)


@pytest.mark.parametrize(("gigabytes", "processes"), [(2, 1), (8, 2), (64, 21)])
def test_an_audit_starts_no_more_processes_than_memory_holds(
    gigabytes: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": gigabytes << 18, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert importlib.import_module("attn_testkit_corpus.commands.audit")._processes_that_fit() == processes
