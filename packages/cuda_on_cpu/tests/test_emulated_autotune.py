"""An autotuned kernel takes the first configuration that its own pruning leaves; nothing is timed."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

from cuda_on_cpu import EmulationError

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

kernels = importlib.import_module("emulation_kernels")

pytestmark = pytest.mark.usefixtures("cuda")


def configs(*blocks: int, **options: Any) -> list[Any]:
    return [triton.Config({"BLOCK": block}, num_warps=2, **options) for block in blocks]


def tuned(*blocks: int, kernel: Any = kernels.add_block, **options: Any) -> Any:
    return triton.autotune(configs(*blocks), key=["n"], **options)(kernel)


def launch(kernel: Any, x: torch.Tensor, block: torch.Tensor) -> int:
    """Add 1 to all of x; the size of the blocks."""
    kernel[lambda meta: (len(x) // meta["BLOCK"],)](x, block, len(x))
    return int(block)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.zeros(16, device="cuda")


@pytest.fixture
def block() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def test_the_first_configuration_is_taken(x, block):
    kernel = tuned(8, 4)
    assert launch(kernel, x, block) == 8
    assert kernel.best_config.kwargs == {"BLOCK": 8}
    assert launch(kernel, x, block) == 8
    assert x.tolist() == [2] * 16


def test_a_captured_launch_is_replayed(x, block, capture):
    kernel = tuned(8, 4)
    graph, _ = capture(lambda: kernel[(2,)](x, block, 16))
    assert x.sum() == 0
    graph.replay()
    graph.replay()
    assert x.tolist() == [2] * 16


def test_pruning_comes_first_and_once_for_a_key(x, block):
    asked = []

    def early(configs: list[Any], arguments: dict[str, Any], **_: Any) -> list[Any]:
        asked.append(arguments["n"])
        return [config for config in configs if config.kwargs["BLOCK"] < arguments["n"]]

    kernel = tuned(16, 8, 4, prune_configs_by={"early_config_prune": early})
    assert [launch(kernel, x, block) for _ in range(2)] == [8, 8]
    assert launch(kernel, torch.zeros(32, device="cuda"), block) == 16
    assert asked == [16, 32]


def test_a_performance_model_orders_them(x, block):
    prune = {"perf_model": lambda BLOCK, **_: -BLOCK if BLOCK < 16 else 0, "top_k": 2}
    assert launch(tuned(4, 8, 16, prune_configs_by=prune), x, block) == 8


def test_hooks_run_as_they_do_once_a_key_is_tuned(x, block):
    called = []
    listed = [
        triton.Config({"BLOCK": size}, pre_hook=lambda arguments: called.append(arguments["BLOCK"])) for size in (8, 4)
    ]
    kernel = triton.autotune(listed, key=["n"], reset_to_zero=["x"], restore_value=["block"])(kernels.add_block)
    x.fill_(5)
    for _ in range(2):
        assert launch(kernel, x, block) == 8
    assert called == [8, 8]
    assert x.tolist() == [7] * 16


def test_a_configuration_that_would_not_compile_is_passed_over(x, block, capture):
    kernel = tuned(16, 8, 4, kernel=kernels.add_small_block)
    graph, _ = capture(lambda: kernel[lambda meta: (16 // meta["BLOCK"],)](x, block, 16))
    graph.replay()
    assert (block.item(), x.tolist()) == (8, [1] * 16)
    with pytest.raises(Exception, match="AssertionError"):
        launch(tuned(32, 16, kernel=kernels.add_small_block), torch.zeros(32, device="cuda"), block)


def test_heuristics_stand_above_or_below(x, block):
    below = triton.heuristics({"BLOCK": lambda arguments: arguments["n"] // 4})(kernels.add_block)
    assert launch(below, x, block) == 4
    above = triton.heuristics({"n": lambda arguments: 16})(tuned(8, 4))
    above[(2,)](x, block)
    assert (block.item(), x.tolist()) == (8, [2] * 16)


def test_nothing_of_it_stays(x, block):
    kernel = tuned(8, 4)
    before = dict(vars(kernel))
    launch(kernel, x, block)
    assert {name: vars(kernel)[name] for name in before if name != "nargs"} == before
    assert kernel.cache == {}


def test_a_tuner_that_is_another_one_is_refused(x, block):
    kernel = tuned(8, 4)
    del kernel.cache
    with pytest.raises(EmulationError, match="has no cache"):
        launch(kernel, x, block)
