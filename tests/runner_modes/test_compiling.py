"""Compilers and tuners inside of a call: they may wait for the device, and whoever calls them may not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.compiling import STEPS, _shorter
from attn_testkit.runner_modes.errors import RunError
from attn_testkit.runner_modes.looked_at import looked_at

from attn_testkit.cases.case import parse_case
from attn_testkit.graphs import compilers
from attn_testkit.graphs.compilers import Tuner, at_work_in, recompiling_allowed, room_left, while_compilers_work
from attn_testkit.graphs.host_syncs import host_syncs_forbidden
from attn_testkit.steps.schedule import make_schedule
from cuda_on_cpu import HostSyncError, emulated_cuda


def wait() -> int:
    return int(torch.ones(1, device="cuda").sum().item())


class _Tuner:
    """As a package has it: it waits where it tunes."""

    base_fn = wait
    tuned = 0

    def tune(self) -> None:
        self.tuned += wait()


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> _Tuner:
    module = ModuleType("a_tuner_of_kernels")
    module.Tuner = _Tuner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compilers, "TUNERS", (Tuner(module.__name__, "Tuner.tune", "a tuner"),))
    return _Tuner()


@pytest.fixture
def cuda() -> Iterator[None]:
    with emulated_cuda():
        yield


def test_a_tuner_may_wait_and_its_caller_may_not(cuda: None, tuner: _Tuner) -> None:
    worked: list[str] = []
    stock = _Tuner.tune
    with host_syncs_forbidden(True, worked.append):
        tuner.tune()
        assert torch.cuda.get_sync_debug_mode() == 2
        with pytest.raises(HostSyncError):
            wait()
        with pytest.raises(RuntimeError, match="would go unseen"):
            torch.cuda.set_sync_debug_mode("default")
    assert (worked, tuner.tuned) == (["a tuner, of kernel wait"], 1)
    assert _Tuner.tune is stock
    assert torch.cuda.get_sync_debug_mode() == 0


def test_what_works_is_noted_where_waits_are_allowed_too(cuda: None, tuner: _Tuner) -> None:
    worked: list[str] = []
    with host_syncs_forbidden(False, worked.append):
        tuner.tune()
        wait()
    assert worked == ["a tuner, of kernel wait"]


def test_a_tuner_that_raises_leaves_the_look_on(cuda: None, tuner: _Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: _Tuner) -> None:
        raise ValueError("no configuration fits")

    monkeypatch.setattr(_Tuner, "tune", broken)
    with host_syncs_forbidden(), pytest.raises(ValueError, match="no configuration fits"):
        tuner.tune()
    with host_syncs_forbidden():
        with pytest.raises(ValueError, match="no configuration fits"):
            tuner.tune()
        with pytest.raises(HostSyncError):
            wait()


def test_torch_compile_is_noticed_once_for_each_compilation() -> None:
    begun: list[str] = []
    ended: list[int] = []
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with while_compilers_work(begun.append, lambda: ended.append(len(begun))):
        for size in (2, 2, 3):
            compiled(torch.ones(size))
    assert (begun, ended) == (["torch.compile"] * 2, [1, 2])
    compiled(torch.ones(4))
    assert len(begun) == 2
    assert "size mismatch at index 0. expected 3, actual 4" in compilers.compilations()[-1].why


def test_there_is_room_for_more_compilations_than_torch_allows_a_function() -> None:
    compilers.forget_compiled()
    compiled = torch.compile(lambda x: x + 2, backend="eager", dynamic=False)
    before = room_left()
    for size in range(2, 2 + before - 2):
        compiled(torch.ones(size))
    assert room_left() == 2
    compilers.make_room()
    assert room_left() == before
    begun: list[str] = []
    with recompiling_allowed(), while_compilers_work(begun.append, lambda: None):
        for size in range(2, 2 + before + 3):
            compiled(torch.ones(size))
    assert len(begun) == before + 3
    compilers.forget_compiled()


def from_file(name: str) -> Callable[..., Any]:
    """A function that calls another one, and that stands in a file of that name."""
    made: dict[str, Any] = {}
    exec(compile("def run(call):\n    return call()\n", name, "exec"), made)
    run: Callable[..., Any] = made["run"]
    return run


OPAQUE = from_file("/somewhere/tilelang/jit/kernel.py")


class _Called:
    def __init__(self, times: int, through: Callable[..., Any]) -> None:
        """It waits so many times, in a function of ``through``."""
        self.times, self.calls, self.through = times, 0, through

    def __call__(self) -> int:
        self.calls += 1
        return self.through(wait) if self.calls <= self.times else 0


def look(call: Callable[[], int], no_waits: bool = True) -> int:
    return looked_at(SimpleNamespace(compiled=[]), "forward", "a label", no_waits, call)  # type: ignore[arg-type]


def test_a_compiler_that_nothing_announces_is_let_work_and_looked_at_from_the_next_call_on(cuda: None) -> None:
    once = _Called(2, OPAQUE)
    assert look(once) == 0
    assert once.calls == 3


def test_one_that_works_at_every_call_is_found(cuda: None) -> None:
    always = _Called(9, OPAQUE)
    with pytest.raises(RunError) as raised:
        look(always)
    assert isinstance(raised.value.__cause__, HostSyncError)
    assert always.calls == 3


def test_a_wait_of_the_callers_own_is_found_at_the_first_call(cuda: None) -> None:
    own = _Called(1, from_file("/somewhere/author.py"))
    with pytest.raises(RunError):
        look(own)
    assert own.calls == 1
    assert look(_Called(1, OPAQUE), no_waits=False) == 1


def test_a_compiler_is_known_by_its_frames_and_by_what_its_exception_was_raised_from(cuda: None) -> None:
    def fails() -> None:
        raise ValueError("inside")

    def wraps() -> None:
        try:
            OPAQUE(fails)
        except ValueError as error:
            raise RuntimeError("outside") from error

    for call, expected in ((fails, False), (wraps, True)):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            call()
        assert at_work_in(raised.value) is expected


def test_a_compilers_own_exceptions_are_known_though_they_have_no_frames_of_it() -> None:
    with pytest.raises(Exception, match="no such tile") as raised:
        torch.compile(lambda x: x + 3, backend=_no_such_tile)(torch.ones(2))
    assert at_work_in(raised.value)


def _no_such_tile(graph: object, inputs: object) -> None:
    raise ValueError("no such tile")


def test_steps_of_other_lengths_have_the_same_requests_and_rows() -> None:
    step = make_schedule(parse_case("decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod")).steps[0]
    shorter = list(_shorter(step))
    assert [each.lens for each in shorter] == [
        [3, 15, 40], [2, 14, 39], [1, 13, 38], [1, 12, 37], [1, 11, 36],
    ]  # fmt: skip
    assert len(shorter) == STEPS
    assert all(each.tokens == step.tokens and each.bucket == step.bucket for each in shorter)
    assert all(len(request.slots) == request.prefix + request.new for each in shorter for request in each.requests)
    short = replace(step, requests=step.requests[:1])
    assert list(_shorter(short)) == []
