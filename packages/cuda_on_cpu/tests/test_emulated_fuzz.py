"""Random programs replay bitwise equal to an eager run, on new inputs, in the same memory."""

from __future__ import annotations

import emulation_programs as programs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuda_on_cpu import Policy, emulated_cuda

PROGRAMS, CHUNKS, REPLAYS = 600, 10, 2


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))


def check(steps: list[programs.Step], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = [matrix.cuda() for matrix in programs.new_inputs(generator)]
    before = [matrix.clone() for matrix in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = programs.run(steps, inputs)
    assert all(map(same_bits, inputs, before)), "the capture left its mark"
    for _ in range(REPLAYS):
        fresh = programs.new_inputs(generator)
        for matrix, value in zip(inputs, fresh, strict=True):
            matrix.copy_(value)
        graph.replay()
        wanted = programs.run(steps, fresh)
        assert len(wanted) == len(outputs)
        for position, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
            assert same_bits(got.cpu(), want), f"value {position} of {steps}"


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs_replay_bitwise_equal_to_eager(chunk, mode):
    size = PROGRAMS // CHUNKS // 2
    offset = 0 if mode == "no_grad" else PROGRAMS // 2
    with getattr(torch, mode)(), emulated_cuda():
        for seed in range(offset + chunk * size, offset + (chunk + 1) * size):
            check(programs.random_steps(seed), seed)


STEPS = st.builds(
    programs.Step, st.sampled_from(sorted(programs.OPERATIONS)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(STEPS, min_size=1, max_size=8))
def test_short_programs_replay_bitwise_equal_to_eager(steps):
    with torch.no_grad(), emulated_cuda(Policy(fill=0x3C)):
        check(steps, 1)
