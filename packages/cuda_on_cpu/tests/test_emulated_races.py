"""Races inside a launch: each wrong program is reported with the memory and both programs, and each right one runs."""

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

programs = importlib.import_module("race_programs")
PAIRS = [pytest.param(pair, id=re.sub(r"\W+", "-", pair.name)) for pair in programs.PAIRS]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_right_program_is_quiet(pair):
    for _ in range(3):  # noted down, then walked
        with torch.no_grad(), emulated_cuda():
            (pair.right_kernel or pair.kernel)[pair.grid](*pair.right(), **dict(pair.options))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_wrong_program_is_reported_with_the_memory_and_the_other_program(pair):
    for _ in range(3):
        with torch.no_grad(), emulated_cuda(), pytest.raises(RaceError) as raised:
            pair.kernel[pair.grid](*pair.wrong(), **dict(pair.options))
        assert re.search(pair.says, str(raised.value)), raised.value


def test_races_are_not_looked_for_where_the_policy_says_so():
    pair = programs.PAIRS[0]
    with torch.no_grad(), emulated_cuda(Policy(races=False)):
        pair.kernel[pair.grid](*pair.wrong(), **dict(pair.options))


def test_programs_may_race_for_memory_that_was_declared_to_be_scratch():
    pair = next(each for each in programs.PAIRS if each.name == "padded rows of slot 0")
    with torch.no_grad(), emulated_cuda():
        x, to, out = pair.wrong()
        scratch(out[0])
        pair.kernel[pair.grid](x, to, out, **dict(pair.options))
        to.fill_(1)
        with pytest.raises(RaceError, match="byte 16 of out"):
            pair.kernel[pair.grid](x, to, out, **dict(pair.options))
    scratch(torch.zeros(3))  # outside of the emulation


def test_a_replay_may_race_for_scratch_as_its_capture_did():
    pair = next(each for each in programs.PAIRS if each.name == "padded rows of slot 0")
    with torch.no_grad(), emulated_cuda():
        x, to, out = pair.wrong()
        scratch(out[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pair.kernel[pair.grid](x, to, out, **dict(pair.options))
        graph.replay()
        to.fill_(1)
        with pytest.raises(RaceError, match="byte 16 of out"):
            graph.replay()


def test_scratch_that_is_gone_is_forgotten():
    pair = programs.PAIRS[0]
    with torch.no_grad(), emulated_cuda():
        for _ in range(300):  # more than the storages between two purges
            scratch(torch.zeros(64, device="cuda"))
        pair.kernel[pair.grid](*pair.right(), **dict(pair.options))
        with pytest.raises(RaceError):
            pair.kernel[pair.grid](*pair.wrong(), **dict(pair.options))


def test_memory_whose_shadow_does_not_fit_is_not_looked_at(monkeypatch):
    def no_room(*_):
        raise MemoryError

    monkeypatch.setattr("cuda_on_cpu.triton_races._Shadow", no_room)
    pair = programs.PAIRS[0]
    with torch.no_grad(), emulated_cuda():
        pair.kernel[pair.grid](*pair.wrong(), **dict(pair.options))
