"""The comparison of launches with the stock interpreter, and a quick part of the corpus where its packages are."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cuda_on_cpu import emulated_cuda

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton's own functions are made
pytest.importorskip("triton")
if os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

interpreter: Any = importlib.import_module("triton.runtime.interpreter")
examples: Any = importlib.import_module("corpus_examples")
launches: Any = importlib.import_module("corpus_launches")
table: Any = importlib.import_module("corpus_table")
if not isinstance(interpreter.tl.standard.zeros_like, interpreter.InterpretedFunction):
    pytest.skip("Triton was imported without its interpreter", allow_module_level=True)


def seen(run: Callable[[], object], most: int = 4) -> list[Any]:
    found: list[Any] = []
    with torch.no_grad(), emulated_cuda(), launches.compared(interpreter, found, most):
        run()
    return found


def add(dtype: torch.dtype = torch.float32, grid: Any = (2,)) -> torch.Tensor:
    x = torch.linspace(-1, 1.3, 11).to(dtype).cuda()
    y = torch.full((11,), 0.3).to(dtype).cuda()
    examples.add[grid](x, y, 11, BLOCK=8)
    return y


def test_float32_leaves_the_same_bits_and_the_result_of_the_emulation():
    results: list[torch.Tensor] = []
    (launch,) = seen(lambda: results.append(add()))
    assert (launch.kernel, launch.verdict, launch.repairs) == ("corpus_examples.add", launches.SAME, ())
    assert torch.equal(results[0], torch.linspace(-1, 1.3, 11) + torch.full((11,), 0.3))


def test_bfloat16_differs_from_stock_by_its_arithmetic_alone():
    (launch,) = seen(lambda: add(torch.bfloat16))
    assert (launch.verdict, launch.repairs) == (launches.FLOATS, ("floats",))


def test_tf32_differs_from_stock_by_its_arithmetic_alone():
    def run() -> None:
        x, y = torch.rand(16, 16).cuda(), torch.rand(16, 16).cuda()
        examples.multiply[(1,)](x, y, torch.empty_like(x), N=16)

    (launch,) = seen(run)
    assert launch.verdict == launches.FLOATS


def test_one_wrong_bit_of_the_emulation_is_seen(monkeypatch: pytest.MonkeyPatch):
    with emulated_cuda():
        emulated = interpreter.GridExecutor.__call__

    def wrong(executor: Any, x: torch.Tensor, y: torch.Tensor, *rest: Any, **names: Any) -> None:
        emulated(executor, x, y, *rest, **names)
        y.view(torch.int32)[10] ^= 1

    found: list[Any] = []
    with torch.no_grad(), emulated_cuda():
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", wrong)
        with launches.compared(interpreter, found):
            add()
        monkeypatch.undo()
    assert [(launch.verdict, launch.detail) for launch in found] == [(launches.DIFFERENT, "1 of 44 bytes")]


def test_memory_that_a_kernel_reaches_by_a_number_is_compared_too(monkeypatch: pytest.MonkeyPatch):
    targets: list[torch.Tensor] = []

    def run() -> None:
        target = torch.zeros(4).cuda()
        targets.append(target)
        examples.through_a_pointer[(1,)](torch.tensor([target.data_ptr()]).cuda(), 2.0)

    (launch,) = seen(run)
    assert (launch.verdict, targets[0].tolist()) == (launches.SAME, [2.0, 0.0, 0.0, 0.0])


def test_what_stock_cannot_run_is_compared_once_it_is_given_that():
    (listed,) = seen(lambda: add(grid=[2]))
    assert (listed.verdict, listed.repairs) == (launches.SAME, ("repairs",))
    assert table.reason(listed.detail) == "a grid that is a list"

    def run() -> None:
        examples.root_of[(1,)](torch.tensor([4.0, 9.0]).cuda(), 2, BLOCK=2)

    (named,) = seen(run)
    assert (named.verdict, named.repairs) == (launches.SAME, ("repairs",))
    assert table.reason(named.detail).startswith("functions of `triton.language` under another name")


def test_a_launch_that_the_emulation_refuses_is_reported_apart_and_the_program_goes_on():
    found: list[Any] = []
    with torch.no_grad(), emulated_cuda():
        emulated = interpreter.GridExecutor.__call__

        def refuse(executor: Any, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("refused")

        interpreter.GridExecutor.__call__ = refuse
        try:
            with launches.compared(interpreter, found):
                result = add()
        finally:
            interpreter.GridExecutor.__call__ = emulated
        assert torch.equal(result.cpu(), torch.linspace(-1, 1.3, 11) + torch.full((11,), 0.3))
    assert [launch.verdict for launch in found] == [launches.EMULATION_RAISES]


def test_no_more_launches_of_a_kernel_are_compared_than_asked():
    assert len(seen(lambda: [add() for _ in range(3)], most=2)) == 2


@pytest.mark.parametrize(("deep", "count"), [(True, 5), (False, 3)])
def test_lines_that_ran_are_counted(deep: bool, count: int):
    (launch,) = seen(lambda: examples.branches[(1,)](torch.ones(1).cuda(), deep=deep))
    assert len(launch.lines) == count
    assert launch.of == 5


def test_nothing_of_triton_stays_replaced():
    before = interpreter.GridExecutor.__call__
    seen(add)
    assert interpreter.GridExecutor.__call__ is before


def one(verdict: str, detail: str = "", repairs: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"kernel": "m.k", "verdict": verdict, "detail": detail, "repairs": repairs, "wrote": True}


@pytest.mark.parametrize(
    ("seen_so_far", "verdict"),
    [
        ([(False, one("same")), (False, one("different", "1 of 4 bytes"))], "different"),
        ([(False, one("same")), (False, one("emulation raises", "TypeError"))], "emulation raises"),
        ([(True, one("same")), (True, one("emulation raises", "StrayAccessError: 1"))], "same"),
        ([(False, one("same")), (False, one("emulation raises", "StrayAccessError: 1"))], "emulation raises"),
        ([(True, one("both raise", "TypeError")), (True, one("floats"))], "floats"),
        ([(False, one("same", "TypeError", ("repairs",)))], "repaired"),
        ([(True, one("both raise", "TypeError"))], "not run"),
        ([(False, one("stock raises", "TypeError | repaired: ValueError"))], "stock raises"),
    ],
)
def test_the_worst_of_a_kernel_is_its_verdict(seen_so_far: list[Any], verdict: str):
    assert table.outcome(seen_so_far)[0] == verdict


def test_a_kernel_that_wrote_nothing_with_generated_arguments_was_not_compared():
    assert table.outcome([(True, {**one("same"), "wrote": False})])[0] == "not run"
    assert table.outcome([(False, {**one("same"), "wrote": False}), (True, one("same"))])[0] == "same"


def test_whether_a_launch_changed_memory_is_noted():
    (changed,) = seen(add)
    (unchanged,) = seen(lambda: examples.add[(1,)](torch.ones(8).cuda(), torch.ones(8).cuda(), 0, BLOCK=8))
    assert (changed.wrote, unchanged.wrote) == (True, False)


FLA = importlib.util.find_spec("fla")


@pytest.mark.filterwarnings("ignore")  # of what the package imports
@pytest.mark.skipif(FLA is None, reason="flash-linear-attention is not installed: bash ci/servers.sh kernels")
@pytest.mark.parametrize(
    "name", ["gated_delta_rule.fused_recurrent_gated_delta_rule", "gated_delta_rule.chunk_gated_delta_rule"]
)
def test_a_public_operator_leaves_the_bits_of_the_stock_interpreter_but_for_tf32(name: str):
    with emulated_cuda():
        calls = dict(importlib.import_module("corpus_calls_fla").calls())
    found: list[Any] = []
    with emulated_cuda(), launches.compared(interpreter, found, most=1):
        calls[name]()
    assert found
    assert {launch.verdict for launch in found} <= {launches.SAME, launches.FLOATS}
