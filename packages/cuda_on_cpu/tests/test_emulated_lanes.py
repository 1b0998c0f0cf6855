"""Threads of one program: each wrong program is reported with its memory, and each right one runs."""

from __future__ import annotations

import importlib
import os
import re

import pytest
import torch

from cuda_on_cpu import Policy, RaceError, emulated_cuda, scratch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

programs = importlib.import_module("lane_programs")
PAIRS = [pytest.param(pair, id=re.sub(r"\W+", "-", pair.name)) for pair in programs.PAIRS]
ROTATION = next(pair for pair in programs.PAIRS if pair.kernel is programs.rotate_in_place)


def launched(pair, arguments, **options):
    pair.kernel[(1,)](*arguments(), **{**dict(pair.options), **options})


@pytest.mark.parametrize("pair", PAIRS)
def test_a_right_program_is_quiet(pair):
    with torch.no_grad(), emulated_cuda():
        for _ in range(4):  # noted down, then walked
            launched(pair, pair.right, **dict(pair.right_options))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_wrong_program_is_reported_with_its_memory(pair):
    with torch.no_grad(), emulated_cuda(), pytest.raises(RaceError) as raised:
        launched(pair, pair.wrong)
    assert re.search(pair.says, str(raised.value), re.S), raised.value
    assert raised.value.site.filename == programs.__file__


def test_a_walked_program_is_looked_at_as_well():
    with torch.no_grad(), emulated_cuda():
        pool, source = programs.some(8, 32), programs.whole(0, 1, 2, 3)
        target = programs.whole(4, 5, 6, 7)
        for _ in range(4):
            programs.slots_moved[(1,)](pool, source, target, False, R=4, N=32)
        target.copy_(programs.whole(1, 0, 2, 3))
        with pytest.raises(RaceError, match="of pool"):
            programs.slots_moved[(1,)](pool, source, target, False, R=4, N=32)


def test_barriers_and_sums_of_a_walked_program_order_its_threads():
    with torch.no_grad(), emulated_cuda():
        for how in (1, 3):
            for _ in range(4):
                x, buffer, out = programs.some(16, 16), programs.some(16, 16) * 0, programs.some(16, 16)
                programs.through_memory[(1,)](x, buffer, out, how, N=16)


def test_programs_of_a_launch_are_looked_at_one_by_one():
    """Program 0 loads what no other one stores: threads of two programs are no threads of one."""
    with torch.no_grad(), emulated_cuda():
        programs.written_twice[(3,)](programs.some(256), programs.some(256) * 0, True, N=128)


def test_memory_that_was_declared_to_be_scratch_may_be_used_in_any_order():
    with torch.no_grad(), emulated_cuda():
        x = programs.some(256)
        scratch(x)
        programs.rotate_in_place[(1,)](x, 0, N=128)


def test_threads_are_not_looked_at_where_races_are_not():
    with torch.no_grad(), emulated_cuda(Policy(races=False)):
        launched(ROTATION, ROTATION.wrong)


def test_a_capture_and_its_replay_are_looked_at():
    with torch.no_grad(), emulated_cuda():
        pool, source = programs.some(8, 32), programs.whole(0, 1, 2, 3)
        target, graph = programs.whole(4, 5, 6, 7), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            programs.slots_moved[(1,)](pool, source, target, False, R=4, N=32)
        graph.replay()
        target.copy_(programs.whole(1, 0, 2, 3))
        with pytest.raises(RaceError, match="of pool"):
            graph.replay()
