"""ci/bench.py: its figures are kept, and compared only with figures of the same machine. The tests measure no time."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

CI = Path(__file__).resolve().parents[2] / "ci"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``ci/bench_record.py``."""
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("bench_record")


def record(bench: ModuleType, **changes: Any) -> Any:
    rows = (
        bench.Row("mine", "decode", "eager", 20.0, 30.0, 0.0, 150.0, 300.0, {"eager": 12.5}),
        bench.Row("mine", "decode", "graph", 80.0, 100.0, 112.5, 50.0, 325.0, {"capture": 40.0, "replay": 8.0}),
    )
    made = bench.Record(
        {"cpu": "A", "cores": "2"}, {"torch": "2.13.0"}, rows, {"mine: start to the plan": 3.0}, {"mine: judge": 200.0}
    )
    return replace(made, **changes)


def test_a_record_is_read_as_it_was_written(bench: ModuleType, tmp_path: Path) -> None:
    bench.write(record(bench), tmp_path / "bench.json")
    assert bench.read(tmp_path / "bench.json") == record(bench)


def test_every_figure_that_both_records_hold_is_compared_and_no_other(bench: ModuleType) -> None:
    before = record(bench)
    eager, graph = before.rows
    now = record(
        bench,
        rows=(replace(graph, case_run_ms=40.0), replace(eager, mode="target-verify")),
        start_s={"mine: start to the plan": 1.5, "mine: start to the first result": 4.0},
        memory_mb={"mine: judge": 300.0},
    )
    assert bench.compared(now, before) == [
        ("mine decode graph, ms a case-run", 80.0, 40.0),
        ("mine decode graph, CPU ms a case-run", 100.0, 100.0),
        ("mine: start to the plan, s", 3.0, 1.5),
        ("mine: judge, MB", 200.0, 300.0),
    ]


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"cpu": "B", "cores": "2"}, "cpu 'B' there, 'A' here"),
        ({"cpu": "A", "cores": "16"}, "cores '16' there, '2' here"),
        ({"cpu": "A"}, "cores 'unknown' there, '2' here"),
        ({"cpu": "A", "cores": "2", "device": "H200"}, "device 'H200' there, 'unknown' here"),
    ],
)
def test_another_machine_is_refused_with_what_differs(bench: ModuleType, there: dict[str, str], said: str) -> None:
    with pytest.raises(bench.OtherMachine, match="figures of another machine cannot be compared") as refused:
        bench.compared(record(bench), record(bench, machine=there))
    assert said in str(refused.value)


def test_other_versions_are_no_other_machine_and_are_named(bench: ModuleType) -> None:
    before = record(bench, versions={"torch": "2.12.0", "triton": "3.9.0"})
    assert bench.compared(record(bench), before)
    assert bench.changed_versions(record(bench), before) == ["torch 2.12.0 -> 2.13.0", "triton 3.9.0 -> none"]


def test_a_step_is_named_from_a_tenth_of_the_time_on(bench: ModuleType) -> None:
    spent = {"replay": 1.0, "setup": 0.999, "capture": 6.0}
    assert bench.tenths(spent, 10.0) == [("capture", 0.6), ("replay", 0.1)]
    assert bench.tenths(spent, 0.0) == []


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 0}', '{"format": 2, "rows": [{}]}', '{"format": 2}'])
def test_what_is_no_record_is_said_so(bench: ModuleType, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bench\.json (is not a record of the bench|was written by another version)"):
        bench.read(path)


def test_what_a_figure_belongs_to_has_the_device_in_it(bench: ModuleType) -> None:
    here = bench.machine("NVIDIA H200 sm90", in_process=False)
    assert here["device"] == "NVIDIA H200 sm90"
    assert here != bench.machine("CPU (emulated CUDA)", in_process=False)
    assert here != bench.machine("NVIDIA H200 sm90", in_process=True), "judge and worker take turns there"
    assert int(here["cores"]) > 0
    assert all(isinstance(value, str) and value for value in here.values())


def test_the_command_refuses_a_file_that_is_no_record_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(CI))
    command = importlib.import_module("bench")
    (tmp_path / "bench.json").write_text(json.dumps({"format": 2}))
    done = CliRunner().invoke(command.main, ["--against", str(tmp_path / "bench.json")])
    assert done.exit_code == 1
    assert "is not a record of the bench" in done.output


def test_functions_of_the_kit_count_with_all_that_they_call_and_others_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(CI))
    command = importlib.import_module("bench")
    stats = {
        ("/somewhere/attn_testkit/families/expected.py", 41, "expect"): (1, 1, 0.5, 4.0, {}),
        ("/somewhere/runner_modes/replay.py", 7, "replay"): (1, 1, 0.0, 3.0, {}),
        ("~", 0, "<method 'exp_'>"): (9, 9, 2.0, 2.0, {}),
        ("/lib/python3.11/threading.py", 10, "wait"): (1, 1, 0.0, 9.0, {}),
    }
    assert command._by_function(stats) == {
        "expect (attn_testkit/families/expected.py:41)": 4.0,
        "replay (runner_modes/replay.py:7)": 3.0,
        "<method 'exp_'>, by itself": 2.0,
        "wait, by itself": 0.0,
    }


def test_every_sample_belongs_to_one_step_and_one_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CI))
    parts = importlib.import_module("bench_profile").parts
    judge, eager = (
        ("/x/attn_testkit/running/case_runs/evaluate.py", "_judged"),
        ("/x/runner_modes/eager.py", "run_eager"),
    )
    stacks = [
        ([("/t/torch/functional.py", "einsum"), ("/x/attn_testkit/backends/mine.py", "forward"), eager, judge], 5),
        (
            [
                ("/x/packages/cuda_on_cpu/cuda_on_cpu/recorder.py", "take"),
                ("/x/runner_modes/harness.py", "load"),
                eager,
                judge,
            ],
            2,
        ),
        ([("/x/attn_testkit/model.py", "forward"), eager, judge], 1),
        ([judge], 1),
        ([("/lib/python3.11/threading.py", "load")], 1),
    ]
    assert parts(stacks) == [
        ("eager plans and forwards", 0.6, {"backends": 0.5, "model": 0.1}),
        ("numbers in place", 0.2, {"cuda_on_cpu": 0.2}),
        ("the rest", 0.2, {"running": 0.1, "Python": 0.1}),
    ]
    assert parts([]) == []


def test_every_step_that_is_named_is_a_function_of_that_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CI))
    root = CI.parent
    for file, function in importlib.import_module("bench_profile").STEPS:
        found = [*root.glob(f"attn_testkit/**/{file}"), *root.glob(f"runner_modes/{file}")]
        assert any(f"def {function}(" in path.read_text() for path in found), (file, function)
