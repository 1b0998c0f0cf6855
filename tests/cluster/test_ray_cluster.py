"""A run on a real Ray cluster: each case-run once, with its node, whatever happens to a node."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from alive import alive

from attn_testkit.cli import main
from attn_testkit.cluster.judge import Cluster
from attn_testkit.registry import UsageError
from attn_testkit.reports.record import read_report
from attn_testkit.results.case_result import Status
from attn_testkit.results.names import KIT_ERROR
from attn_testkit.running.planning.request import Options, Request


def _cluster(**options) -> Cluster:
    import ray

    return Cluster(ray, Options(**options))


def _node_id(node) -> str:
    """As results name it."""
    return node.node_id[:8]


def test_planning_happens_on_a_node_and_what_is_wrong_with_the_request_comes_back(nodes):
    (cpu,) = _cluster().architectures("cpu")
    judge = _cluster().judge(cpu)
    assert len(judge.plan(Request(("fake:ok",), device="cpu")).items) == 4
    with pytest.raises(UsageError, match="did you mean 'fake:ok'"):
        judge.plan(Request(("no_such",), device="cpu"))


def test_a_cluster_without_gpus_runs_emulated_and_asks_for_none(nodes):
    (cpu,) = _cluster().architectures("cpu")
    assert (cpu.name, cpu.gpus, cpu.slots) == ("emulated", 0, 3)
    assert _cluster(jobs=2).architectures("cpu")[0].slots == 1, "no node has two cores: one shard, that Ray waits with"


def test_each_case_run_has_one_result_with_the_node_that_ran_it(nodes):
    (cpu,) = _cluster().architectures("cpu")
    judge = _cluster().judge(cpu)
    plan = judge.plan(Request(("fake:ok,wrong,lost,ok,ok,ok",), device="cpu"))
    results = list(judge.run(plan, plan.items))
    assert Counter((r.execution, r.case) for r in results) == Counter((i.execution, i.case) for i in plan.items)
    assert Counter(r.status for r in results) == {Status.PASSED: 16, Status.FAILED: 4, Status.CRASHED: 4}
    assert all(r.node and not r.gpu for r in results)


def test_a_judge_that_dies_is_the_kits_own_failure_and_no_silent_hole(nodes):
    (cpu,) = _cluster().architectures("cpu")
    judge = _cluster().judge(cpu)
    plan = judge.plan(Request(("fake:ok,dies,ok,ok",), modes=("decode",), executions=("eager",), device="cpu"))
    results = {r.case: r for r in judge.run(plan, plan.items)}
    assert len(results) == 4
    assert results["decode-dies-k1"].reason.startswith(f"{KIT_ERROR}the judge's process ended with exit code 9; ")
    assert sum(result.of_the_kit for result in results.values()) == 1


def test_gpus_of_two_architectures_are_two_runs_and_each_shard_stays_on_its_own(nodes, monkeypatch):
    monkeypatch.setattr("attn_testkit.cluster.judge._ask_for_name", _name_by_label)
    found = _cluster().architectures("cuda")
    assert [(each.name, each.types, each.slots) for each in found] == [("sm90", ("H100",), 1), ("sm100", ("B200",), 1)]
    for architecture in found:
        judge = _cluster().judge(architecture)
        plan = judge.plan(Request(("fake:ok,ok,ok",), modes=("decode",)))
        (node,) = {result.node.split()[1] for result in judge.run(plan, plan.items)}
        assert node == _node_id(nodes.by_type[architecture.types[0]])


def _name_by_label(ray, where, options, device):
    return {"in(H100)": "NVIDIA H100 sm90", "in(B200)": "NVIDIA B200 sm100"}[
        where["label_selector"]["ray.io/accelerator-type"]
    ]


def test_the_command_has_a_verdict_and_a_results_file_for_each_architecture(nodes, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("attn_testkit.cluster.judge._ask_for_name", _name_by_label)
    monkeypatch.chdir(tmp_path)
    code = main(["run", "-b", "fake:ok,wrong", "--mode", "decode", "--device", "cuda", "--ray", "--json", "out.json"])
    out = capsys.readouterr().out.splitlines()
    assert code == 1
    assert [line.partition(":")[0] for line in out if line.startswith("NOT CONFORMANT")] == ["NOT CONFORMANT"] * 2
    assert out[-1] == "sm90: not conformant; sm100: not conformant"
    for kind, name in (("H100", "sm90"), ("B200", "sm100")):
        report = read_report(f"out-{name}.json")
        assert {r.node.split()[1] for r in report.results if r.case} == {_node_id(nodes.by_type[kind])}
        assert report.finished


def test_types_of_one_architecture_are_one_run_on_all_of_them(nodes, monkeypatch):
    monkeypatch.setattr("attn_testkit.cluster.judge._ask_for_name", lambda *_: "NVIDIA H200 sm90")
    (both,) = _cluster().architectures("auto")
    assert (both.name, both.gpus, both.slots) == ("sm90", 1, 2)
    assert set(both.types) == {"H100", "B200"}


def test_a_node_that_is_killed_loses_nothing_finished_and_its_shards_run_elsewhere(nodes):
    """Last of this file: the node is gone then."""
    (cpu,) = _cluster().architectures("cpu")
    judge = _cluster().judge(cpu)
    plan = judge.plan(Request((f"fake:{','.join(['gated'] * 9)}",), modes=("decode",), device="cpu"))
    doomed = nodes.by_type["H100"]
    results, killed = [], False
    for result in judge.run(plan, plan.items):
        results.append(result)
        # Every shard waits in its first graph, so that this one cannot be through.
        if not killed and result.node.split()[1] == _node_id(doomed):
            nodes.cluster.remove_node(doomed, allow_graceful=False)
            _wait_until_gone(int(result.hints[0].removeprefix("pid ")))
            killed = True
            nodes.gate.touch()
    assert killed
    assert Counter((r.execution, r.case) for r in results) == Counter((i.execution, i.case) for i in plan.items)
    assert {r.status for r in results} == {Status.PASSED}
    on = {(r.execution, r.case): r.node.split()[1] for r in results}
    began_there = [case for (execution, case), node in on.items() if execution == "eager" and node == _node_id(doomed)]
    assert began_there, "what the node had finished is kept"
    assert on["graph", began_there[0]] != _node_id(doomed), "the rest of its shard ran on another"


def _wait_until_gone(pid: int) -> None:
    """The judge of a shard ends when the worker of Ray ends, and that when it misses its node."""
    end = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.05)
