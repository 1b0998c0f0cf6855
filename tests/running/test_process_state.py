"""What a process was left like: each setting is seen by itself, said in a sentence, and put back."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_testkit.running.hygiene import process_state
from attn_testkit.running.hygiene.process_state import ProcessState, accepted, changes, restore, take_state, unchanged


@pytest.fixture
def before() -> Iterator[ProcessState]:
    _warn_only()  # imports modules the first time, which warn and replace functions
    torch.use_deterministic_algorithms(False)
    # What pytest itself changes before the test begins.
    os.environ["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"].replace("(setup)", "(call)")
    state = take_state()
    yield state
    restore(state)


def _handle(*_: object) -> None:
    """Not any signal's handler."""


def _variable() -> None:
    os.environ["SOME_SWITCH"] = "1"


def _cwd() -> None:
    os.chdir("/")


def _warn_only() -> None:
    torch.use_deterministic_algorithms(False, warn_only=False)
    torch.use_deterministic_algorithms(True, warn_only=True)


SETTINGS: list[tuple[str, Callable[[], Any]]] = [
    ("the default dtype: torch.float32 -> torch.float64", lambda: torch.set_default_dtype(torch.float64)),
    ("the default device: 'cpu' -> 'meta'", lambda: torch.set_default_device("meta")),
    ("the grad mode: True -> False", lambda: torch.set_grad_enabled(False)),
    ("deterministic algorithms: (False, False) -> (True, False)", lambda: torch.use_deterministic_algorithms(True)),
    ("deterministic algorithms: (False, False) -> (True, True)", _warn_only),
    ("the float32 matmul precision: 'highest' -> 'high'", lambda: torch.set_float32_matmul_precision("high")),
    (
        "kernels of scaled_dot_product_attention: 'flash, mem_efficient",
        lambda: torch.backends.cuda.enable_flash_sdp(False),
    ),
    ("torch's random state: seed ", lambda: torch.manual_seed(20_261)),
    ("numpy's random state: seeded or set", lambda: np.random.seed(3)),
    ("Python's random state: seeded or set", lambda: random.seed(3)),
    ("the garbage collector: True -> False", gc.disable),
    ("environment variables: SOME_SWITCH None -> '1'", _variable),
    ("the filters of warnings: ", lambda: warnings.simplefilter("ignore")),
    (
        "signal handlers: SIGUSR1 <Handlers.SIG_DFL: 0> -> <function _handle",
        lambda: signal.signal(signal.SIGUSR1, _handle),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "change"), SETTINGS, ids=[text for text, _ in SETTINGS])
def test_a_setting_that_was_changed_is_named_with_before_and_after_and_put_back(
    before: ProcessState, sentence: str, change: Callable[[], Any]
) -> None:
    assert changes(before) == []
    assert unchanged(before)
    change()
    found = changes(before)
    assert not unchanged(before)
    if "default device" in sentence:  # torch enters a mode for it
        assert len(found) == 2
    else:
        assert len(found) == 1
    assert found[0].startswith(sentence)
    restore(before)
    assert changes(before) == []
    assert unchanged(before)


def test_the_number_of_threads_and_the_current_directory_are_put_back(before: ProcessState) -> None:
    here, threads = os.getcwd(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    _cwd()
    assert changes(before) == [
        f"the number of CPU threads of torch: {threads} -> {threads + 1}",
        f"the current directory: {here!r} -> '/'",
    ]
    restore(before)
    assert (os.getcwd(), torch.get_num_threads()) == (here, threads)


def test_the_filters_of_warnings_are_counted_and_the_first_is_shown(before: ProcessState) -> None:
    count = len(warnings.filters)
    warnings.resetwarnings()
    assert changes(before) == [f"the filters of warnings: {count} filters -> 0, first is None"]
    warnings.simplefilter("ignore")
    assert changes(before) == [
        f"the filters of warnings: {count} filters -> 1, first is {('ignore', None, Warning, None, 0)!r}"
    ]
    restore(before)
    assert len(warnings.filters) == count


def test_random_numbers_go_on_where_they_were(before: ProcessState) -> None:
    drawn = [(float(torch.rand(1)), float(np.random.rand()), random.random()) for _ in "1"]
    assert not unchanged(before)
    assert changes(before) == [], "a server tolerates that"
    restore(before)
    assert drawn == [(float(torch.rand(1)), float(np.random.rand()), random.random())]


def test_environment_variables_are_set_changed_and_removed_again(
    before: ProcessState, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = os.environ.get("HOME", "")
    os.environ["HOME"] = "/elsewhere"
    path = os.environ.pop("PATH")
    os.environ["A_NEW_ONE"] = "1"
    assert changes(before) == [
        f"environment variables: A_NEW_ONE None -> '1', HOME {home!r} -> '/elsewhere', PATH {path!r} -> None"
    ]
    os.environ["B_NEW_ONE"] = "2"
    assert "PATH" not in changes(before)[0], "three are enough"
    restore(before)
    assert (os.environ.get("HOME"), os.environ["PATH"]) == (home, path)
    assert "A_NEW_ONE" not in os.environ


@pytest.mark.parametrize(
    "name", ["TRITON_CACHE", "TORCHINDUCTOR_X", "FLASHINFER_X", "CUDA_X", "NVCC_X", "KINETO_X", "TVM_X"]
)
def test_what_compilers_of_kernels_set_for_themselves_is_nobodys_fault(before: ProcessState, name: str) -> None:
    os.environ[name] = "1"
    assert changes(before) == []


def test_what_may_differ_is_skipped_and_nothing_else(before: ProcessState) -> None:
    _variable()
    torch.set_default_dtype(torch.float64)
    assert [text.partition(":")[0] for text in changes(before)] == ["the default dtype", "environment variables"]
    assert [text.partition(":")[0] for text in changes(before, skip=("environment variables",))] == [
        "the default dtype"
    ]


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
def test_a_mode_that_was_entered_and_not_left_is_seen(before: ProcessState, mode: type[Any]) -> None:
    with mode():
        (found,) = changes(before)
        assert found == f"function and dispatch modes that were entered: () -> ('{mode.__qualname__}',)"
    assert changes(before) == []
    mode().__enter__()
    restore(before)
    assert changes(before) == []


def _new(*_: object) -> None:
    """In the place of a function."""


class _Kept:
    """A class of the kit's, as far as is watched."""

    LIMIT = 3
    count = 0

    def method(self) -> int:
        return 1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the kit."""
    module = types.ModuleType("attn_testkit.of_a_test")
    kept = type("Kept", (_Kept,), {"method": _Kept.method, "LIMIT": 3, "count": 0, "__module__": module.__name__})
    foreign = type("Foreign", (), {"LIMIT": 3, "__module__": "elsewhere"})
    values = {
        "function": _new, "LIMIT": 1, "_PRIVATE": 2, "count": 3, "module": types, "Kept": kept, "Foreign": foreign,
        "TABLE": {"a": 1, "b": 2}, "_OTHER": {}, "table": {},
    }  # fmt: skip
    for name, value in values.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


REPLACED = [("function", len), ("LIMIT", 2), ("_PRIVATE", 3), ("module", sys), ("Kept", int), ("TABLE", {})]


@pytest.mark.parametrize(("name", "value"), REPLACED, ids=[name for name, _ in REPLACED])
def test_functions_classes_modules_and_constants_of_the_kit_are_watched(
    watched: types.ModuleType, name: str, value: object
) -> None:
    before, was = take_state(), getattr(watched, name)
    setattr(watched, name, value)
    assert not unchanged(before)
    assert changes(before) == [f"attn_testkit.of_a_test.{name} was replaced"]
    restore(before)
    assert getattr(watched, name) is was
    delattr(watched, name)
    assert changes(before) == [f"attn_testkit.of_a_test.{name} was removed"]
    restore(before)
    assert changes(before) == []


def test_variables_are_a_modules_own_business_and_so_is_what_is_new(watched: types.ModuleType) -> None:
    before = take_state()
    watched.count = 4  # type: ignore[attr-defined]
    watched.new = _new  # type: ignore[attr-defined]
    watched.table["x"] = 1
    watched.Foreign.LIMIT = 4
    watched.__doc__ = "another"
    assert not unchanged(before), "it has to look"
    assert changes(before) == []
    assert unchanged(before), "and need not look again"
    watched.LIMIT = 2  # type: ignore[attr-defined]
    assert changes(before) == ["attn_testkit.of_a_test.LIMIT was replaced"]
    assert not unchanged(before)


@pytest.mark.parametrize(("name", "value"), [("method", _new), ("LIMIT", 4)])
def test_methods_and_constants_of_its_classes_are_watched(watched: types.ModuleType, name: str, value: object) -> None:
    before = take_state()
    setattr(watched.Kept, name, value)
    assert changes(before) == [f"attn_testkit.of_a_test.Kept.{name} was replaced"]
    restore(before)
    assert changes(before) == []
    watched.Kept.count = 1
    assert changes(before) == []


@pytest.mark.parametrize("change", [{"a": 2}, {"c": 3}])
def test_a_table_of_the_kit_is_watched_entry_by_entry(watched: types.ModuleType, change: dict[str, int]) -> None:
    before = take_state()
    watched.TABLE.update(change)
    assert changes(before) == ["attn_testkit.of_a_test.TABLE was modified"]
    restore(before)
    assert watched.TABLE == {"a": 1, "b": 2}
    del watched.TABLE["a"]
    watched._OTHER["x"] = 1
    assert len(changes(before)) == 2
    restore(before)
    assert (watched.TABLE, watched._OTHER) == ({"a": 1, "b": 2}, {})
    assert changes(before) == []


@pytest.mark.parametrize(
    "package",
    ["attn_testkit.backends", "attn_testkit.examples", "attn_testkit_corpus.faults", "attn_testkit_servers.fakes"],
)
def test_modules_of_backends_may_keep_state(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    module = types.ModuleType(f"{package}.of_a_test")
    module.LIMIT = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = take_state()
    module.LIMIT = 2  # type: ignore[attr-defined]
    assert changes(before) == []


def test_a_state_is_that_of_its_moment_and_of_nobody_else(
    watched: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = take_state()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "allclose", _new)
        assert take_state().owners["torch"][1]["allclose"] is _new
        for_itself = accepted(first).into(first)
        assert changes(for_itself) == []
    second = take_state()
    watched.count = 4  # type: ignore[attr-defined]
    assert changes(second) == []
    assert take_state().owners[watched.__name__][1]["count"] == 4
    assert changes(first) == changes(take_state()) == []
    assert changes(for_itself) == ["torch.allclose was replaced"]
    assert unchanged(take_state()), "what another did with its own is not seen"
    other = types.ModuleType("attn_testkit.of_another_test")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    assert other.__name__ in take_state().owners


def test_public_functions_of_torch_are_watched(before: ProcessState, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, said in (
        (torch, "allclose", "torch.allclose"),
        (torch.nn.functional, "softmax", "torch.nn.functional.softmax"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.linalg, "vector_norm", "torch.linalg.vector_norm"),
        (torch.Tensor, "backward", "torch.Tensor.backward"),
        (torch.cuda.CUDAGraph, "replay", "torch.cuda.CUDAGraph.replay"),
        (torch.cuda.Event, "record", "torch.cuda.Event.record"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _new)
            assert changes(before) == [f"{said} was replaced"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__doc__", "another")
        assert changes(before) == []


def test_where_a_package_replaces_what_is_its_own_nothing_is_watched() -> None:
    assert not any(name.startswith("numpy") for name in take_state().owners)
    assert process_state.__name__ in take_state().owners
