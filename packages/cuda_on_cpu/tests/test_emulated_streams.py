"""Side streams: what belongs to a capture, and what must be joined."""

from __future__ import annotations

import pytest
import torch

from cuda_on_cpu import CaptureError

pytestmark = pytest.mark.usefixtures("cuda")


def ones() -> torch.Tensor:
    return torch.ones(4, device="cuda")


def test_a_joined_side_stream_is_part_of_the_graph(capture):
    x, side = ones(), torch.cuda.Stream()

    def run():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    graph, y = capture(run)
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [7] * 4


def test_an_unjoined_side_stream_is_refused_and_the_fork_named(capture):
    x, side = ones(), torch.cuda.Stream()

    def run():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x * 2

    with pytest.raises(CaptureError, match="fork that was not joined") as caught:
        capture(run)
    assert caught.value.site.function == "run"
    assert capture(lambda: x + 1)[0] is not None


def test_work_after_the_join_must_be_joined_again(capture):
    x, side = ones(), torch.cuda.Stream()

    def run(again: bool):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x * 2
        main.wait_stream(side)
        with torch.cuda.stream(side):
            y.add_(1)
        if again:
            main.wait_stream(side)
        return y

    with pytest.raises(CaptureError, match="not joined"):
        capture(lambda: run(False))
    graph, y = capture(lambda: run(True))
    graph.replay()
    assert y.tolist() == [3] * 4


def test_a_join_through_another_stream_counts(capture):
    x, a, b = ones(), torch.cuda.Stream(), torch.cuda.Stream()

    def run():
        main = torch.cuda.current_stream()
        a.wait_stream(main)
        with torch.cuda.stream(a):
            y = x * 2
        b.wait_stream(a)
        with torch.cuda.stream(b):
            z = y + 1
        main.wait_stream(b)
        return z

    graph, z = capture(run)
    graph.replay()
    assert z.tolist() == [3] * 4


def test_waiting_for_work_outside_the_capture_is_refused(capture):
    side = torch.cuda.Stream()
    with pytest.raises(CaptureError, match="uncaptured work"):
        capture(lambda: torch.cuda.current_stream().wait_stream(side))


def test_events_carry_a_capture_from_stream_to_stream(capture):
    x, side = ones(), torch.cuda.Stream()
    ready, done = torch.cuda.Event(), torch.cuda.Event()

    def run():
        ready.record()
        side.wait_event(ready)
        with torch.cuda.stream(side):
            y = x * 2
            done.record()
        torch.cuda.current_stream().wait_event(done)
        return y

    graph, y = capture(run)
    graph.replay()
    assert y.tolist() == [2] * 4


@pytest.mark.parametrize(
    "wait",
    [
        "torch.cuda.synchronize()",
        "torch.cuda.current_stream().synchronize()",
        "torch.cuda.current_stream().query()",
        "torch.cuda.current_stream().record_event().synchronize()",
        "torch.cuda.current_stream().record_event().query()",
    ],
)
def test_the_host_may_not_wait_inside_a_capture(capture, wait):
    with pytest.raises(CaptureError):
        capture(lambda: eval(wait))
    eval(wait)


def test_streams_have_handles_and_nest():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    assert first.cuda_stream != second.cuda_stream != 0
    assert first != second
    with torch.cuda.stream(first), torch.cuda.stream(second):
        assert torch.cuda.current_stream() is second
    assert torch.cuda.current_stream().cuda_stream == 0
    with torch.cuda.stream(None):
        assert torch.cuda.current_stream().cuda_stream == 0


def test_timing_events_measure():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    assert end.query()


def test_a_recorded_stream_keeps_nothing_from_running():
    x = ones()
    x.record_stream(torch.cuda.current_stream())
    assert x.tolist() == [1] * 4
