"""Every test here is an ordinary CUDA program, run inside the emulation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from cuda_on_cpu import emulated_cuda

os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine is slow, and slow is not wrong. What is found does not depend on luck.
hypothesis.settings.register_profile("alone", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("alone")


@pytest.hookimpl(tryfirst=True)  # before fixtures draw
def pytest_runtest_setup() -> None:
    """A test draws the same numbers whatever its process has run before."""
    torch.default_generator.manual_seed(0)


@pytest.fixture
def cuda() -> Iterator[None]:
    """Inside the emulation, under no_grad."""
    with torch.no_grad(), emulated_cuda():
        yield


def _capture(run: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    return graph, result


@pytest.fixture
def capture() -> Callable[..., tuple[torch.cuda.CUDAGraph, Any]]:
    """capture(run) -> (graph, what run returned)."""
    return _capture
