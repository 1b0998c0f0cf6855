"""Other legal orders: of the programs of a launch, of two kernels that overlap, of a host that asks too early."""

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

programs = importlib.import_module("pdl_and_order_programs")
ORDERS = [Policy(program_order="forward"), Policy(program_order="reverse")]


def results(policies, run, *args):
    found = []
    for policy in policies:
        for _ in range(2):  # noted down, then walked
            with torch.no_grad(), emulated_cuda(policy):
                value = run(*args)
                found.append(value.tolist() if isinstance(value, torch.Tensor) else value)
    return found


def test_a_result_that_depends_on_which_program_comes_first_differs_in_the_other_order():
    forward, _, reverse, _ = results(ORDERS, programs.claimed, False)
    assert forward == [100, 101, 102, 103]
    assert reverse == forward[::-1]


def test_a_kernel_that_notes_whose_place_is_whose_gives_the_same_in_both_orders():
    assert results(ORDERS, programs.claimed, True) == [[100, 101, 102, 103]] * 4


def test_a_kernel_that_may_wait_for_the_program_before_runs_in_order():
    for policy in ORDERS:
        with torch.no_grad(), emulated_cuda(policy):
            flags, out = (torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(2))
            programs.look_back[(4,)](flags, out)
            assert out.tolist() == [0, 1, 2, 3]


RIGHT = [(torch.arange(32.0) * 2 + 1).view(4, 8).flip(0).reshape(-1).tolist()]


@pytest.mark.parametrize(
    ("waits", "pdl", "between"), [(1, True, False), (2, True, False), (0, False, False), (0, True, True)]
)
def test_a_kernel_that_waits_or_need_not_is_quiet(waits, pdl, between):
    assert results([Policy()], programs.chained, waits, pdl, between) == RIGHT * 2


def test_a_kernel_that_reads_what_the_one_before_writes_without_a_wait_is_refused():
    for _ in range(2):
        with torch.no_grad(), emulated_cuda(), pytest.raises(RaceError, match="memory of x that triton kernel produce"):
            programs.chained(0, True)
    with torch.no_grad(), emulated_cuda(Policy(races=False)):
        programs.chained(0, True)


@pytest.mark.parametrize("program", programs.TOO_EARLY)
def test_the_first_access_of_a_kernel_that_begins_early_comes_after_its_wait(program):
    for _ in range(2):
        with torch.no_grad(), emulated_cuda(), pytest.raises(RaceError) as raised:
            program(waits=False)
        assert re.search(programs.TOO_EARLY[program], str(raised.value), re.S), raised.value


@pytest.mark.parametrize("program", [*programs.TOO_EARLY, *programs.IN_TIME])
def test_a_kernel_that_waits_may_use_what_earlier_kernels_use(program):
    for _ in range(2):
        with torch.no_grad(), emulated_cuda():
            program(waits=True)


@pytest.mark.parametrize("program", programs.IN_TIME)
def test_a_kernel_need_not_wait_for_what_has_certainly_ended(program):
    for _ in range(2):
        with torch.no_grad(), emulated_cuda():
            program(waits=False)


def test_memory_that_was_declared_to_be_scratch_may_be_used_too_early():
    with torch.no_grad(), emulated_cuda():
        x, doubled, out = programs._memory()
        scratch(x)
        programs.produce[(4,)](x, doubled)
        programs.uses[(4,)](x, out, how=1, waits=False, launch_pdl=True)


def test_a_graph_that_was_replayed_between_two_kernels_orders_them():
    with torch.no_grad(), emulated_cuda():
        x, doubled, out = programs._memory()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            programs.produce[(4,)](x, doubled)
            x.add_(1)
        graph.replay()
        programs.uses[(4,)](doubled, out, how=0, waits=False, launch_pdl=True)


def test_a_graph_records_the_missing_wait_and_replays_the_right_one():
    def in_graph(waits):
        graph = torch.cuda.CUDAGraph()
        x, mid, out = (torch.zeros(32, device="cuda") for _ in range(3))
        table = torch.zeros(4, dtype=torch.int32, device="cuda")
        with torch.cuda.graph(graph):
            programs.produce[(4,)](x, mid)
            programs.consume[(4,)](mid, table, out, waits=waits, launch_pdl=True)
        graph.replay()

    with torch.no_grad(), emulated_cuda():
        in_graph(1)
    with torch.no_grad(), emulated_cuda(), pytest.raises(RaceError, match="gdc_wait"):
        in_graph(0)


def test_a_host_that_asks_too_early_sees_that_a_late_device_is_not_done():
    late = [Policy(), Policy(late=True)]
    assert results(late, programs.polled, True) == [7.0] * 4
    assert results(late, programs.polled, False) == [7.0, 7.0, -1.0, -1.0]


def test_a_late_device_is_done_where_the_host_has_waited_and_when_it_is_asked_again():
    def asked(wait):
        event = torch.cuda.Event()
        torch.ones(3, device="cuda").add_(1)
        event.record()
        wait(event)
        return event.query(), event.query()

    with emulated_cuda(Policy(late=True)):
        assert asked(lambda event: None) == (False, True)
        assert asked(lambda event: event.synchronize()) == (True, True)
        assert asked(lambda event: torch.cuda.synchronize()) == (True, True)
        assert asked(lambda event: torch.ones(1, device="cuda").item()) == (True, True)
        assert asked(lambda event: torch.cuda.Event().query()) == (False, True)
        assert torch.cuda.Event().query()
