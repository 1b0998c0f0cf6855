"""Judges that the controller's judge has forked for workers of xdist do what judges in fresh interpreters do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from alive import alive

from attn_testkit.running.planning.request import Request
from attn_testkit.running.processes import judge_process
from attn_testkit.running.processes.forked import Forked
from attn_testkit.running.processes.judge_process import JudgeProcess

SPEC = "attn_testkit.examples.off_by_one:OffByOneBackend"
CASE = "decode-mha2-d128-bf16-p16-k21-interleaved-rising_logits-b4stale"
AUTHOR = """
import os
from attn_testkit.examples import MinimalBackend

class Backend(MinimalBackend):
    capabilities = MinimalBackend.capabilities.with_changes(kv_pool={"page_sizes": {int(os.environ["SIZE_OF_A_PAGE"])}})
    notes = (os.getcwd(), os.environ["CUDA_VISIBLE_DEVICES"])
"""


@contextlib.contextmanager
def judge(place: str = "") -> Iterator[JudgeProcess]:
    with contextlib.closing(JudgeProcess(device="cpu", place=place)) as made:
        yield made


@pytest.fixture(scope="module")
def controllers(judges_are_forked: None) -> Iterator[JudgeProcess]:
    with judge() as made:
        yield made


def result_of(judge: JudgeProcess) -> dict[str, object]:
    plan = judge.plan(Request((SPEC,), executions=("eager",), device="cpu", cases=(CASE,)))
    (result,) = judge.run(plan, plan.items)
    return {key: value for key, value in asdict(result).items() if key != "seconds"}


def test_one_finds_what_the_controllers_finds_and_ends_by_itself(controllers: JudgeProcess) -> None:
    with judge(controllers.for_worker()) as forked:
        assert isinstance(forked._process, Forked)
        pid = forked._process.pid
        assert os.getsid(pid) == pid not in (os.getsid(0), os.getsid(controllers._process.pid))
        assert result_of(forked) == result_of(controllers)
        assert forked._process.poll() is None
    assert forked._process.poll() == 0
    assert not alive(pid)


def test_one_has_the_path_the_folder_and_the_environment_of_its_worker(
    controllers: JudgeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "author.py").write_text(AUTHOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("SIZE_OF_A_PAGE", "32")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-of-this-worker")
    with judge(controllers.for_worker()) as forked:
        assert isinstance(forked._process, Forked)
        plan = forked.plan(Request(("author:Backend",), device="cpu"))
        assert plan.header.notes["author:Backend"] == (str(tmp_path), "GPU-of-this-worker")
        assert all("-p32-" in item.case for item in plan.items)


def test_a_fresh_interpreter_judges_where_a_fork_would_differ_or_is_taken(
    controllers: JudgeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = controllers.for_worker()
    with judge(taken) as first, judge(taken) as second, judge(str(tmp_path / "nothing")) as third:
        assert isinstance(first._process, Forked)
        assert not isinstance(second._process, Forked)
        assert not isinstance(third._process, Forked)
        assert second.device_name("cpu") == first.device_name("cpu")
    place = controllers.for_worker()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with judge(place) as made:
        assert not isinstance(made._process, Forked)


def test_one_that_is_killed_is_replaced_by_a_fresh_one_and_ends_no_other(controllers: JudgeProcess) -> None:
    with judge(controllers.for_worker()) as killed, judge(controllers.for_worker()) as other:
        assert isinstance(killed._process, Forked)
        killed.device_name("cpu")
        forked = killed._process
        forked.kill()
        assert killed.device_name("cpu") == other.device_name("cpu")
        assert not isinstance(killed._process, Forked)
        forked.send_signal(signal.SIGTERM)  # nobody


def test_one_that_lives_is_waited_for_in_vain(controllers: JudgeProcess) -> None:
    with judge(controllers.for_worker()) as forked, pytest.raises(subprocess.TimeoutExpired):
        forked._process.wait(0.01)


def test_those_that_a_judge_has_forked_end_with_it_and_leave_no_file() -> None:
    with judge() as made:
        used, unused = made.for_worker(), made.for_worker()
        assert Path(unused).parent.stat().st_mode & 0o077 == 0, "others have no access"
        forked = JudgeProcess(device="cpu", place=used)
        assert isinstance(forked._process, Forked)
        assert forked.device_name("cpu")
    assert forked._process.wait(60) == 0
    assert not Path(used).parent.exists()
    assert not Path(unused).parent.exists()
    forked.close()


def test_none_is_forked_for_another_runner_than_the_one_that_is_imported(
    controllers: JudgeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_process, "RUNNER", "quick_runner")
    assert controllers.for_worker() == ""
