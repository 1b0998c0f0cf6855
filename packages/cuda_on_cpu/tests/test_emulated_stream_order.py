"""Two streams and one piece of memory: what must be ordered, and all that orders it."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from cuda_on_cpu import EmulationError, emulated_cuda, orderly_stream

pytestmark = pytest.mark.usefixtures("cuda")

RACE = "nothing orders the two"


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (8,), device="cuda")


def main() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def forked() -> torch.cuda.Stream:
    side = torch.cuda.Stream()
    side.wait_stream(main())
    return side


def doubled_on(side: torch.cuda.Stream, x: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(side):
        return x * 2


def doubled() -> tuple[torch.cuda.Stream, torch.Tensor]:
    """A side stream that waited, and what it computed, which nobody waits for."""
    x = ones()
    side = forked()
    return side, doubled_on(side, x)


def race() -> contextlib.AbstractContextManager[pytest.ExceptionInfo[EmulationError]]:
    return pytest.raises(EmulationError, match=RACE)


def test_a_result_of_a_stream_that_nobody_waits_for_is_refused_in_four_parts():
    _, y = doubled()
    with race() as caught:
        y + 1
    error = caught.value
    assert type(error) is EmulationError
    assert error.operation == "Tensor.add"
    assert error.site.function == "test_a_result_of_a_stream_that_nobody_waits_for_is_refused_in_four_parts"
    assert "it reads memory that Tensor.mul at" in error.cuda
    assert "the two run in any order, and the result is that of either" in error.cuda
    assert "wait_stream" in error.cure


def test_a_stream_that_waits_for_nothing_may_not_read_what_the_other_wrote():
    side = torch.cuda.Stream()
    x = ones()
    with race():
        doubled_on(side, x)


def test_nor_write_what_the_other_reads():
    x = ones()
    doubled_on(forked(), x)
    with race() as caught:
        x.fill_(3)
    assert "it writes memory that Tensor.mul" in caught.value.cuda
    assert "read on another stream" in caught.value.cuda


def test_two_may_read_at_once():
    x = ones()
    doubled_on(forked(), x)
    assert (x + 1).tolist() == [2] * 8


def by_event(side: torch.cuda.Stream) -> None:
    main().wait_event(side.record_event())


def through_another(side: torch.cuda.Stream) -> None:
    other = torch.cuda.Stream()
    other.wait_stream(side)
    main().wait_stream(other)


def until_done(side: torch.cuda.Stream) -> None:
    event = side.record_event()
    while not event.query():
        pass


def timed(side: torch.cuda.Stream) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(side)
    end.record(side)
    start.elapsed_time(end)


def next_capture() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass


@pytest.mark.parametrize(
    "order",
    [
        "main().wait_stream(side)",
        "by_event(side)",
        "through_another(side)",
        "until_done(side)",
        "timed(side)",
        "next_capture()",
        "side.record_event().synchronize()",
        "side.synchronize()",
        "side.query()",
        "torch.cuda.synchronize()",
        "torch.cuda.empty_cache()",
    ],
)
def test_what_orders_two_streams(order):
    side, y = doubled()
    eval(order, {**globals(), "side": side})
    assert (y + 1).tolist() == [3] * 8


@pytest.mark.parametrize(
    "read",
    [
        "y[0].item()",
        "y.tolist()",
        "y.cpu()",
        "bool(y.any())",
        "y[0].tolist()",
        "str(y)",
        "y.nonzero()",
        "y[y > 1]",
        'torch.tensor([1, 2], device="cuda")',
        "y[[0, 2]]",
        "y.copy_(torch.ones(8))",
        "torch.empty(8).copy_(y)",
        "y.copy_(torch.ones(8), non_blocking=True)",
    ],
)
def test_so_does_a_host_that_waits_for_one_of_them(read):
    side, y = doubled()
    with torch.cuda.stream(side):
        eval(read)
    y + 1


@pytest.mark.parametrize("blocks", [False, True])
def test_a_copy_of_pinned_memory_orders_nothing_unless_it_blocks(blocks):
    x, host = ones(), torch.ones(8).pin_memory()
    side = forked()
    with torch.cuda.stream(side):
        x.copy_(host, non_blocking=not blocks)
    with contextlib.nullcontext() if blocks else race():
        x + 1


@pytest.mark.parametrize(
    "read",
    ["y.tolist()", "y[0].item()", "y.cpu()", "y.to('cpu', non_blocking=True)", "print(y)", "torch.empty(8).copy_(y)"],
)
def test_the_host_reads_by_the_current_stream(read):
    _, y = doubled()
    with race():
        eval(read, {"y": y, "torch": torch})


def test_an_event_stands_for_what_was_launched_before_it():
    side, y = doubled()
    early = side.record_event()
    z = doubled_on(side, y)
    main().wait_event(early)
    y + 1
    with race():
        z + 1


@pytest.mark.parametrize(
    ("there", "here", "meet"),
    [
        ("x[:4].fill_(2)", "x[4:] + 1", False),
        ("x[:5].fill_(2)", "x[4:] + 1", True),
        ("x[::2].fill_(2)", "x[1::2] + 1", False),
        ("x[::2].fill_(2)", "x[::2] + 1", True),
        ("x[::2].fill_(2)", "x[:1] + 1", True),
        ("x[::2].fill_(2)", "x + 1", True),
    ],
)
def test_parts_of_one_tensor_are_several_pieces(there, here, meet):
    x = ones()
    with torch.cuda.stream(forked()):
        eval(there, {"x": x})
    with race() if meet else contextlib.nullcontext():
        eval(here, {"x": x})


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda")


def test_rows_picked_by_numbers_may_be_others():
    x, some, others = ones(8, 2), rows(0, 1), rows(2, 3)
    side = forked()
    with torch.cuda.stream(side):
        x[some] = x[others]
    assert x[others].shape == (2, 2)
    with race():
        x + 1


@pytest.mark.parametrize(("place", "meet"), [(-9, True), (-8, False), (3, False), (4, True), (7, True), (8, False)])
def test_an_element_lies_in_a_chosen_row_or_beside_it(place, meet):
    x, row, element = ones(4, 4), rows(1), rows(place)
    with torch.cuda.stream(forked()):
        x.index_fill_(0, row, 2)
    with race() if meet else contextlib.nullcontext():
        x.take(element)


def test_the_numbers_themselves_are_read():
    x, some = ones(8, 2), rows(0, 1)
    doubled_on_side = doubled_on(forked(), some)
    with race():
        x.index_select(0, doubled_on_side)


def test_a_mask_may_pick_nothing():
    x, mask = ones(), torch.zeros(8, dtype=torch.bool, device="cuda")
    side = forked()
    with torch.cuda.stream(side):
        x.masked_scatter_(mask, ones())
    x + 1


@pytest.mark.parametrize("look", [torch.zeros_like, torch.empty_like, torch.Tensor.t, torch.Tensor.numel])
def test_who_asks_for_a_shape_reads_nothing(look):
    x = ones()
    y = doubled_on(forked(), x)
    look(y.view(2, 4))
    del x


def dropped() -> torch.cuda.Stream:
    """A side stream that reads a tensor of this stream, which is dropped."""
    x = ones()
    side = forked()
    doubled_on(side, x)
    return side


def test_freed_memory_that_a_side_stream_still_reads_may_be_allocated_but_not_written():
    dropped()
    y = torch.empty(8, device="cuda")
    with pytest.raises(EmulationError, match=r"Tensor.fill_.*that tensor was freed.*record_stream"):
        y.fill_(3)


@pytest.mark.parametrize("size", [8, 128, 129])
def test_it_is_given_to_who_asks_for_as_many_bytes(size):
    dropped()
    with pytest.raises(EmulationError, match="record_stream") if size <= 128 else contextlib.nullcontext():
        torch.zeros(size, device="cuda")


@pytest.mark.parametrize("order", ["main().wait_stream(side)", "side.synchronize()", "torch.cuda.synchronize()"])
def test_it_may_be_written_by_who_waited(order):
    side = dropped()
    eval(order, {**globals(), "side": side})
    torch.zeros(8, device="cuda")


def test_it_is_not_given_to_another_stream():
    other = torch.cuda.Stream()
    dropped()
    with torch.cuda.stream(other):
        torch.zeros(8, device="cuda")


def test_memory_that_was_freed_is_not_that_of_its_successor():
    side = forked()
    for size in range(1, 40):
        x = torch.empty(size, device="cuda")
        y = doubled_on(side, x)
        x.record_stream(side)
        del x, y
        assert torch.full((size,), 2.0, device="cuda").sum() == 2 * size


def test_a_replay_is_work_of_its_stream(capture):
    x = ones()
    graph, y = capture(lambda: x + 1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.fill_(3)
    with race() as caught:
        graph.replay()
    assert caught.value.operation.startswith("replay of aten.add.Tensor at")
    main().wait_stream(side)
    graph.replay()
    with torch.cuda.stream(side), race():
        y + 1
    side.wait_stream(main())
    with torch.cuda.stream(side):
        assert y.tolist() == [4] * 8


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("replayed", [False, True])
def test_a_launch_of_triton_reads_and_writes_what_its_program_does(capture, waits, replayed):
    kernels = pytest.importorskip("emulation_kernels")
    x, other = ones(), ones()
    torch.cuda.synchronize()

    def launch() -> None:
        kernels.add[(1,)](x, 1.0, N=8)

    run = capture(launch)[0].replay if replayed else launch
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.fill_(3)
        other.fill_(3)
    if waits:
        main().wait_stream(side)
    with contextlib.nullcontext() if waits else race() as caught:
        run()
    assert waits or "launch of triton kernel add" in str(caught.value)


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_launch_wrote_is_read_by_nobody_before_it_is_done(waits):
    kernels = pytest.importorskip("emulation_kernels")
    x = ones()
    side = forked()
    with torch.cuda.stream(side):
        kernels.add[(1,)](x, 1.0, N=4)
    if waits:
        main().wait_stream(side)
    x[4:] + 1
    with contextlib.nullcontext() if waits else race():
        x + 1


def test_a_capture_runs_nothing(capture):
    side, x = forked(), ones()
    side.wait_stream(main())
    doubled_on(side, x)
    graph, _ = capture(lambda: x.fill_(2))
    main().wait_stream(side)
    graph.replay()


def test_a_backward_pass_waits_for_the_streams_of_its_forward():
    x = ones().requires_grad_()
    side = forked()
    with torch.enable_grad(), torch.cuda.stream(side):
        y = (x * x).sum()
    y.backward()
    assert x.grad.tolist() == [2] * 8


def test_a_stream_of_somebody_else_may_wait_for_anything():
    torch.cuda.Stream()
    y = doubled_on(torch.cuda.ExternalStream(0xABC), ones())
    assert (y + 1).tolist() == [3] * 8


def test_another_object_for_a_stream_is_the_same_stream():
    side, y = doubled()
    again = torch.cuda.ExternalStream(side.cuda_stream)
    z = doubled_on(again, y)
    with race():
        z + 1
    main().wait_stream(side)
    z + 1


def test_several_threads_may_order_what_is_not_seen():
    _, y = doubled()

    def elsewhere() -> None:
        with emulated_cuda():
            torch.cuda.synchronize()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    y + 1


def test_an_orderly_stream_begins_no_look_and_is_looked_at_beside_another():
    side = orderly_stream()
    assert doubled_on(side, ones()).tolist() == [2] * 8
    torch.cuda.Stream()
    with race():
        doubled_on(side, ones())


def test_what_was_written_before_the_first_stream_counts_as_done():
    x = ones()
    assert doubled_on(torch.cuda.Stream(), x).shape == (8,)


def test_very_many_streams_end_the_look_into_what_they_did_and_begin_another():
    x = torch.zeros(8, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(70)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.ones(8, device="cuda").add_(1)
    with torch.cuda.stream(streams[0]):
        x.add_(1)
    with pytest.raises(EmulationError, match="nothing orders the two"):
        x.add_(1)
