"""Accesses out of bounds: each wrong program is reported with the tensor that it left, and each right one runs."""

from __future__ import annotations

import importlib
import os
import re

import pytest
import torch

from cuda_on_cpu import Policy, emulated_cuda
from cuda_on_cpu.errors import EmulationError

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

programs = importlib.import_module("bounds_programs")
PAIRS = [pytest.param(pair, id=pair.name.replace(" ", "-")) for pair in programs.PAIRS]


def launched(pair, arguments, times=1):
    """Every argument after the kernel was launched."""
    with torch.no_grad(), emulated_cuda(policy=Policy(bounds=pair.bounds)):
        given = arguments()
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
def test_it_is_zero_as_on_most_devices_if_that_is_asked_for(pair):
    with torch.no_grad(), emulated_cuda(Policy(masked_loads="zero")):
        given = dict(zip(pair.kernel.arg_names, pair.wrong(), strict=False))
        pair.kernel[(1,)](*given.values(), **dict(pair.options))
        assert not given["out"].any()


def test_the_memory_of_a_view_is_all_of_its_storage_unless_the_view_is_asked_for():
    pair = next(one for one in programs.PAIRS if one.bounds == "view")
    with torch.no_grad(), emulated_cuda():
        pair.kernel[(1,)](*pair.wrong(), **dict(pair.options))


def test_bounds_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="bounds is 'storage' or 'view', not 'page'"):
        Policy(bounds="page")
    with pytest.raises(ValueError, match="masked_loads is 'zero' or 'poison', not 'nan'"):
        Policy(masked_loads="nan")
