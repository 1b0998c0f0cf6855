"""The other order of streams: work of side streams happens when something waits for it."""

from __future__ import annotations

import ctypes
import importlib
import os

import pytest
import torch

from cuda_on_cpu import EmulationError, Policy, emulated_cuda

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

MODULES = [importlib.import_module(f"{name}_programs") for name in ("late", "order", "index")]
PARAMS = [pytest.param(each, id=each.name.replace(" ", "-")) for module in MODULES for each in module.PROGRAMS]
LATE = Policy(side_streams="late")


def left(run, right, policy=LATE):
    with torch.no_grad(), emulated_cuda(policy):
        return run(right).tolist()


@pytest.mark.parametrize("program", PARAMS)
def test_a_right_program_leaves_the_same_numbers_in_both_orders(program):
    assert left(program.run, True) == left(program.run, True, Policy())


@pytest.mark.parametrize("program", PARAMS)
def test_a_wrong_program_is_reported_or_leaves_other_numbers(program):
    try:
        wrong = left(program.run, False)
    except EmulationError:
        return
    assert wrong != left(program.run, True)


WAITS = {
    "nothing": (lambda side, early, x: None, [0, 0, 0]),
    "another tensor": (lambda side, early, x: torch.ones(2, device="cuda").add_(1), [0, 0, 0]),
    "an event": (lambda side, early, x: torch.cuda.current_stream().wait_event(early), [7, 7, 7]),
    "the host and the event": (lambda side, early, x: early.synchronize(), [7, 7, 7]),
    "the stream": (lambda side, early, x: torch.cuda.current_stream().wait_stream(side), [8, 7, 7]),
    "the host and the stream": (lambda side, early, x: side.synchronize(), [8, 7, 7]),
    "the host and the device": (lambda side, early, x: torch.cuda.synchronize(), [8, 7, 7]),
}


def read_memory(x):
    """Numbers in the memory of a tensor, without a call that the emulation sees."""
    return list((ctypes.c_float * x.numel()).from_address(x.data_ptr()))


@pytest.mark.parametrize("name", WAITS)
def test_late_work_is_done_up_to_what_is_waited_for(name):
    wait, expected = WAITS[name]
    with torch.no_grad(), emulated_cuda(LATE):
        x = torch.zeros(3, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.fill_(7)
            early = side.record_event()
            x[:1].fill_(8)
        wait(side, early, x)
        assert read_memory(x) == expected


def test_what_a_stream_computes_into_new_memory_comes_after_its_late_work():
    with torch.no_grad(), emulated_cuda(LATE):
        x = torch.zeros(3, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.fill_(7)
            assert read_memory(x) == [0] * 3
            assert read_memory(x * 2) == [14] * 3


def test_random_numbers_and_work_of_the_default_stream_are_not_late():
    with torch.no_grad(), emulated_cuda(LATE):
        x = torch.zeros(3, device="cuda")
        side = torch.cuda.Stream()
        x.fill_(2)
        assert read_memory(x) == [2] * 3
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.uniform_()
        assert max(read_memory(x)) < 1


def test_late_work_is_done_at_the_end_and_forgotten_after_an_error():
    for error in (False, True):
        try:
            with torch.no_grad(), emulated_cuda(LATE):
                x, side = torch.zeros(3, device="cuda"), torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x.fill_(7)
                if error:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert read_memory(x) == [0 if error else 7] * 3


def test_an_order_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="side_streams is 'at_once' or 'late', not 'never'"):
        Policy(side_streams="never")
