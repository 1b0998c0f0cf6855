"""Judges that tests fork from one process (``tests/warm``) do what judges in fresh interpreters do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import warm_judge

from attn_testkit.running.planning.request import Request
from attn_testkit.running.processes.judge_process import JudgeProcess

SPEC = "attn_testkit.examples.off_by_one:OffByOneBackend"
CASE = "decode-mha2-d128-bf16-p16-k21-interleaved-rising_logits-b4stale"
AUTHOR = """
import os
import sys
from attn_testkit.examples import MinimalBackend

class Backend(MinimalBackend):
    capabilities = MinimalBackend.capabilities.with_changes(kv_pool={"page_sizes": {int(os.environ["SIZE_OF_A_PAGE"])}})
    notes = (os.getcwd(),)
"""


@contextlib.contextmanager
def judge(device: str = "cpu") -> Iterator[JudgeProcess]:
    with contextlib.closing(JudgeProcess(device=device)) as made:
        yield made


def result_of(judge: JudgeProcess) -> dict[str, object]:
    plan = judge.plan(Request((SPEC,), executions=("eager",), device="cpu", cases=(CASE,)))
    (result,) = judge.run(plan, plan.items)
    return {key: value for key, value in asdict(result).items() if key != "seconds"}


def test_a_forked_judge_and_a_fresh_one_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with judge() as forked:
        assert isinstance(forked._process, warm_judge.Forked)
        assert os.getsid(forked._process.pid) == forked._process.pid != os.getsid(0)
        said = result_of(forked)
    assert forked._process.returncode == 0
    monkeypatch.delenv(warm_judge.PLACE)
    with judge() as fresh:
        assert isinstance(fresh._process, subprocess.Popen)
        assert result_of(fresh) == said


def test_it_has_the_path_the_folder_and_the_environment_of_who_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "author.py").write_text(AUTHOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("SIZE_OF_A_PAGE", "32")
    with judge() as forked:
        assert isinstance(forked._process, warm_judge.Forked)
        plan = forked.plan(Request(("author:Backend",), device="cpu"))
        assert plan.header.notes["author:Backend"] == (str(tmp_path),)
        assert all("-p32-" in item.case for item in plan.items)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_end_of_one_is_reported_with_its_signal_and_ends_no_other(number: signal.Signals) -> None:
    with judge() as ended, judge() as other:
        other.device_name("cpu")
        ended.device_name("cpu")
        notes: list[str] = []
        ended.note = notes.append
        ended._process.send_signal(number)
        assert ended.device_name("cpu") == other.device_name("cpu")
        assert notes == [f"the judge's process was killed by {number.name}; another one is starting"]


def test_another_value_of_what_is_read_at_the_start_takes_a_fresh_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with judge() as made:
        assert isinstance(made._process, subprocess.Popen)


def test_what_is_read_at_the_start_is_known_by_the_beginning_of_its_name() -> None:
    read = dict.fromkeys(("OMP_NUM_THREADS", "TRITON_INTERPRET", "TORCH_LOGS", "PYTHONOPTIMIZE", "LD_PRELOAD"), "1")
    assert warm_judge.settings({**read, "PYTHONPATH": "/a", "HOME": "/b", "PYTHONWARNINGS": "ignore"}) == read


@pytest.mark.cold
def test_marked_cold_a_judge_is_fresh() -> None:
    with judge() as made:
        assert isinstance(made._process, subprocess.Popen)
