"""Accesses out of bounds: each wrong program is reported with the tensor that it left, and each right one runs."""

from __future__ import annotations

import importlib
import os
import re

import pytest
import torch

from cuda_on_cpu import Policy, confine, emulated_cuda
from cuda_on_cpu.errors import EmulationError, StrayAccessError

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

programs = importlib.import_module("bounds_programs")
PAIRS = [pytest.param(pair, id=pair.name.replace(" ", "-")) for pair in programs.PAIRS]


def launched(pair, arguments, times=1):
    """Every argument after the kernel was launched."""
    with torch.no_grad(), emulated_cuda(policy=Policy(bounds=pair.bounds, masked_loads="poison")):
        given = arguments()
        confine(*(given[place] for place in pair.confined))
        for _ in range(times):
            pair.kernel[(pair.grid,)](*given, **dict(pair.options))
        return [value.cpu() if isinstance(value, torch.Tensor) else value for value in given]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_right_program_is_quiet(pair):
    for value in launched(pair, pair.right, times=3):  # noted down, then walked
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert value.isfinite().all()


@pytest.mark.parametrize("pair", [one for one in PAIRS if not one.values[0].undefined])
def test_a_wrong_program_is_reported_with_the_tensor_that_it_left(pair):
    with pytest.raises(EmulationError) as raised:
        launched(pair, pair.wrong)
    assert re.search(pair.says, str(raised.value)), raised.value


@pytest.mark.parametrize("pair", [one for one in PAIRS if one.values[0].undefined])
def test_what_a_masked_load_leaves_undefined_is_no_number_that_would_be_right(pair):
    out = dict(zip(pair.kernel.arg_names, launched(pair, pair.wrong, times=3), strict=False))["out"]
    assert bool(out.isnan().all()) if pair.says == "nan" else int(out) > 1 << 20


@pytest.mark.parametrize("pair", [one for one in PAIRS if one.values[0].undefined])
def test_it_is_zero_as_on_most_devices_unless_poison_is_asked_for(pair):
    with torch.no_grad(), emulated_cuda():
        given = dict(zip(pair.kernel.arg_names, pair.wrong(), strict=False))
        pair.kernel[(1,)](*given.values(), **dict(pair.options))
        assert not given["out"].any()


def test_the_memory_of_a_view_is_all_of_its_storage_unless_the_view_is_asked_for():
    pair = next(one for one in programs.PAIRS if one.bounds == "view")
    with torch.no_grad(), emulated_cuda():
        pair.kernel[(1,)](*pair.wrong(), **dict(pair.options))


def load_tile(x, first):
    out = torch.zeros(8, device="cuda")
    programs.load_tile[(1,)](x, out, 8, first, TILE=8)


def test_a_part_of_a_view_that_was_handed_over_may_use_all_of_the_view():
    with torch.no_grad(), emulated_cuda():
        buffer = torch.zeros(40, device="cuda")
        confine(buffer[8:24])
        load_tile(buffer[12:14], 4)
        load_tile(buffer[12:14], -4)
        load_tile(buffer, 30)  # a launch that was given everything
        for first in (5, -5):
            with pytest.raises(StrayAccessError, match="4 bytes"):
                load_tile(buffer[12:14], first)


def test_two_arguments_with_one_pointer_may_use_what_either_may():
    with torch.no_grad(), emulated_cuda():
        buffer = torch.zeros(24, device="cuda")
        confine(buffer[:8])
        programs.two_sides[(1,)](buffer, buffer[:8], torch.zeros(1, device="cuda"), 0, 20)
        programs.two_sides[(1,)](buffer[:8], buffer, torch.zeros(1, device="cuda"), 0, 20)


def test_the_rows_of_the_next_batch_replace_those_of_the_last():
    with torch.no_grad(), emulated_cuda():
        buffer = torch.zeros(24, device="cuda")
        for rows in (16, 8, 16):
            confine(buffer[:rows])
            load_tile(buffer[:rows], rows - 8)
            with pytest.raises(StrayAccessError, match="32 bytes past the end of x"):
                load_tile(buffer[:rows], rows)


def test_views_that_are_gone_confine_nothing(monkeypatch):
    monkeypatch.setattr("cuda_on_cpu.triton_bounds._MOST_STORAGES", 8)
    with torch.no_grad(), emulated_cuda():
        for _ in range(40):
            confine(torch.zeros(24, device="cuda")[:8])
            load_tile(torch.zeros(24, device="cuda")[:8], 8)
    confine(torch.zeros(3))  # outside of the emulation


def test_a_graph_may_not_leave_the_views_that_were_handed_over_either():
    with torch.no_grad(), emulated_cuda():
        buffer, first, out = torch.zeros(24, device="cuda"), programs.whole(0), torch.zeros(1, device="cuda")
        confine(buffer[:8])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            programs.last_of[(1,)](buffer[:8], first.add_(8), out)
        graph.replay()
        first.fill_(1)
        with pytest.raises(StrayAccessError, match="4 bytes past the end of x"):
            graph.replay()


def test_bounds_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="bounds is 'storage' or 'view', not 'page'"):
        Policy(bounds="page")
    with pytest.raises(ValueError, match="masked_loads is 'zero' or 'poison', not 'nan'"):
        Policy(masked_loads="nan")
