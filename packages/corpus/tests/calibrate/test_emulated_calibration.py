"""The emulation against what a real GPU answered."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from functools import cache

import pytest
import torch

from attn_testkit.running.processes.child import Child, ChildLost
from attn_testkit_corpus.calibrate import __main__ as command
from attn_testkit_corpus.calibrate import jobs, store, workers
from attn_testkit_corpus.calibrate.jobs import Job
from cuda_on_cpu import emulated_cuda, rules
from cuda_on_cpu.rule import Rule

MOST_FALSE_ALARMS = 2
RACES = {"side stream: not forked, used", "side stream: event, unjoined", ".to(cpu,nb)"}
"""The GPU got away with them."""


@cache
def answers(kind: str) -> dict[Job, str]:
    """What is judged here, of one kind of job: a process judges only the kinds of its tests."""
    verdicts = {}
    with warnings.catch_warnings(), emulated_cuda():
        warnings.simplefilter("ignore")  # of beta operations in the snippets
        for job in jobs.all_jobs():
            if job.kind == kind:
                with emulated_cuda():
                    verdicts[job] = jobs.run(job)
    assert verdicts
    return verdicts


@pytest.fixture(params=store.stored(), ids=lambda path: path.stem)
def gpu(request) -> store.Verdicts:
    return store.load(request.param)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_no_failure_of_the_gpu_is_missed_and_few_alarms_are_false(gpu, mode):
    result = store.compare(gpu, answers(mode), (mode,))
    assert result.compared > 450
    assert result.gpu_fails > 150
    assert not result.missed, "\n".join(map(str, result.missed))
    assert len(result.false_alarms) <= MOST_FALSE_ALARMS, "\n".join(map(str, result.false_alarms))


def test_host_syncs_in_eager_code_agree(gpu):
    result = store.compare(gpu, answers("sync"), ("sync",))
    assert result.compared > 450
    assert not result.missed, "\n".join(map(str, result.missed))
    assert {each.job.name for each in result.false_alarms} <= RACES, "\n".join(map(str, result.false_alarms))


def test_serving_loops_agree_step_by_step(gpu):
    for job, answer in answers("loops").items():
        truth = gpu.answers[job]
        if "Dangling" in answer:  # reported at the first step, where the GPU damages something later
            assert truth != "pass"
        elif truth.startswith("capture error"):
            assert answer.startswith("capture error")
        else:
            assert answer == truth, job.name


def test_facts_about_graphs_agree(gpu):
    stricter = {"input_resized_after_capture": ("stale", "error")}
    for job, answer in answers("facts").items():
        assert stricter.get(job.name, (answer, answer)) == (gpu.answers[job], answer), job.name


def test_every_measured_rule_names_a_snippet():
    named = {name for rule in _all_rules() for name in rule.measured}
    elsewhere = {"read"} | {job.name for job in jobs.all_jobs() if job.kind == "facts"}
    assert named - set(jobs.SNIPPETS) - elsewhere == set()


def test_every_rule_says_what_happens_and_what_to_do():
    for rule in _all_rules():
        assert rule.why
        assert rule.cuda
        assert rule.cure
        assert rule.measured


def _all_rules() -> list[Rule]:
    return [*rules.RULES, *(value for value in vars(rules).values() if isinstance(value, Rule))]


def test_a_verdict_file_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "verdicts.json"
    answers = {Job("no_grad", "a"): "ok", Job("sync", "a"): "syncs", Job("loops", "L"): "pass"}
    store.save(path, answers)
    loaded = store.load(path)
    assert loaded.answers == answers
    assert loaded.torch == torch.__version__
    assert set(json.loads(path.read_text())["verdicts"]) == {"no_grad", "sync", "loops"}


def test_a_comparison_sorts_differences():
    def answers(**verdicts: str) -> dict[Job, str]:
        return {Job("no_grad", name): verdict for name, verdict in verdicts.items()}

    gpu = store.Verdicts("2.11", "H200", "3.6", answers(a="ok", b="stale", c="ok", d="stale"))
    here = answers(a="ok", b="ok", c="stale", d="capture error: x", e="ok")
    result = store.compare(gpu, here, ("no_grad",))
    assert [d.job.name for d in result.missed] == ["b"]
    assert [d.job.name for d in result.false_alarms] == ["c"]
    assert [d.job.name for d in result.other] == ["d"]
    assert [job.name for job in result.unmeasured] == ["e"]


def test_the_command_compares_and_says_so(capsys):
    assert command.main(["--only", "kv write"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200" in out
    assert "0 missed" in out


def test_the_command_fails_when_something_is_missed(tmp_path, capsys):
    path = tmp_path / "verdicts.json"
    store.save(path, {Job("no_grad", "kv write: index_put"): "stale"})
    assert command.main(["--only", "kv write: index_put", "--verdicts", str(path)]) == 1
    assert "missed" in capsys.readouterr().out


def measured(monkeypatch: pytest.MonkeyPatch, *names: str, workers_: int = 1) -> list[str]:
    """Verdicts of ``odd_jobs``, in the order of the jobs."""
    monkeypatch.setattr(workers, "SERVE", "odd_jobs")
    wanted = [Job(str(number), name) for number, name in enumerate(names)]
    verdicts = workers.run_isolated(wanted, workers_)
    return [verdicts[job] for job in wanted]


def test_measuring_goes_on_in_another_process_where_one_dies(monkeypatch):
    names = ["fine", "dies", "fine", "spoils", "dies", "fine", "last"]
    verdicts = measured(monkeypatch, *names, workers_=2)
    assert [name for name, verdict in zip(names, verdicts, strict=True) if verdict == "died"] == ["dies", "dies"]


def test_a_process_measures_until_a_verdict_spoils_it(monkeypatch):
    first, second, spoilt, third, fourth = measured(monkeypatch, "fine", "fine", "spoils", "fine", "fine")
    assert first == second
    assert spoilt == "capture error: sticky"
    assert third == fourth != first


def test_a_job_that_hangs_is_a_verdict_and_costs_its_process(monkeypatch):
    verdict = workers._verdict

    def impatient(child: Child, job: Job) -> str:
        # Others have as long as a busy machine needs.
        monkeypatch.setattr(workers, "TIMEOUT_SECONDS", 0.5 if job.name == "hangs" else 60.0)
        return verdict(child, job)

    monkeypatch.setattr(workers, "_verdict", impatient)
    before, hung, after = measured(monkeypatch, "fine", "hangs", "fine")
    assert hung == "timeout"
    assert after.startswith("eager error: in process")
    assert after != before


def test_processes_that_cannot_begin_are_no_verdicts(monkeypatch):
    """A broken installation would otherwise be stored as a GPU on which every job dies."""
    monkeypatch.setattr(workers, "SERVE", "no_such_module")
    with pytest.raises(ChildLost, match=r"(?s)ended itself with exit code 1.*No module named 'no_such_module'"):
        workers.run_isolated([Job("sync", "a")], 2)


@pytest.mark.parametrize(
    ("verdict", "spoilt"),
    [
        ("ok", False),
        ("syncs", False),
        ("eager error: IndexError: index 9 is out of bounds", False),
        ("eager error: RuntimeError: CUDA error: an illegal memory access", True),
        ("eager error: AcceleratorError: sticky", True),
        ("replay error: RuntimeError: x", True),
        ("died", True),
        ("timeout", True),
    ],
)
def test_a_process_is_kept_only_where_cuda_was_not_harmed(verdict, spoilt):
    assert workers._process_is_spoilt(verdict) is spoilt


def test_measuring_needs_torch_numpy_and_triton_alone():
    """A machine with a GPU may have a plain checkout, and nothing of ours installed."""
    ours = ["click", "cloudpickle", "jinja2", "packaging", "pytest", "rich"]
    code = f"import sys; sys.modules.update(dict.fromkeys({ours}))\nimport attn_testkit_corpus.calibrate.workers"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
