"""What a capture records and what a replay does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cuda_on_cpu import CaptureError, Policy, emulated_cuda

pytestmark = pytest.mark.usefixtures("cuda")


def ones(n: int = 4) -> torch.Tensor:
    return torch.ones(n, device="cuda")


def test_kernels_do_not_run_during_capture(capture):
    x = torch.zeros(4, device="cuda")
    graph, y = capture(lambda: x.add_(1) * 2)
    assert x.tolist() == [0] * 4
    assert y.isnan().all()
    graph.replay()
    graph.replay()
    assert x.tolist() == [2] * 4
    assert y.tolist() == [4] * 4


def test_a_replay_reads_new_values_at_the_old_addresses(capture):
    x = ones()
    graph, y = capture(lambda: x + 1)
    address = y.data_ptr()
    x.fill_(7)
    graph.replay()
    assert y.tolist() == [8] * 4
    assert y.data_ptr() == address


def test_views_alias_the_memory_that_a_replay_writes(capture):
    x = torch.arange(12.0, device="cuda")
    graph, (columns, _) = capture(lambda: (x.view(3, 4).t()[1:3], x[2:4].mul_(10)))
    graph.replay()
    assert x[2:4].tolist() == [20, 30]
    assert columns[1, 0] == 20


def test_a_host_value_is_frozen_at_capture(capture):
    factor, host = [3], torch.tensor(2.0)
    x = ones(2)
    graph, (y, z) = capture(lambda: (x * factor[0], x * host))
    factor[0] = 9
    host.fill_(9)
    graph.replay()
    assert (y.tolist(), z.tolist()) == ([3, 3], [2, 2])


def test_the_python_of_a_captured_region_runs_once(capture):
    calls = []
    x = ones()
    graph, _ = capture(lambda: (calls.append(1), x.add_(1)))
    graph.replay()
    graph.replay()
    assert len(calls) == 1


def test_factories_run_again_on_every_replay(capture):
    def run():
        zeros = torch.zeros(4, device="cuda")
        steps = torch.arange(4, device="cuda")
        return zeros.add_(1), steps.mul_(2)

    graph, (zeros, steps) = capture(run)
    graph.replay()
    graph.replay()
    assert zeros.tolist() == [1] * 4
    assert steps.tolist() == [0, 2, 4, 6]


def test_out_variants_write_the_memory_they_were_given(capture):
    out = torch.zeros(2, 2, device="cuda")
    a = torch.eye(2).cuda()
    graph, _ = capture(lambda: torch.mm(a, a * 2, out=out))
    a.mul_(3)
    graph.replay()
    assert out.tolist() == [[18, 0], [0, 18]]


def test_random_numbers_are_new_on_every_replay(capture):
    graph, y = capture(lambda: torch.rand(8, device="cuda"))
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)


def test_a_registered_generator_may_be_used_and_another_may_not(capture):
    generator = torch.Generator(device="cuda")
    with pytest.raises(CaptureError, match="register_generator_state"):
        capture(lambda: torch.rand(4, device="cuda", generator=generator))
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        y = torch.rand(4, device="cuda", generator=generator)
    graph.replay()
    assert not y.isnan().any()


def test_a_custom_operation_written_in_python_is_recorded_from_inside(capture):
    with torch.library._scoped_library("emulation_tests", "FRAGMENT") as library:
        library.define("double_into(Tensor x, Tensor(a!) out) -> ()")
        calls = []

        def double_into(x, out):
            calls.append(1)
            out.copy_(x * 2)

        library.impl("double_into", double_into, "CPU")
        x, out = ones(), torch.zeros(4, device="cuda")
        graph, _ = capture(lambda: torch.ops.emulation_tests.double_into(x, out))
        x.fill_(5)
        graph.replay()
        assert out.tolist() == [10] * 4
        assert len(calls) == 1


def test_a_custom_operation_registered_for_cuda_only_runs(capture):
    with torch.library._scoped_library("emulation_tests", "FRAGMENT") as library:
        library.define("plus_arange(Tensor x) -> Tensor")
        library.impl("plus_arange", lambda x: x + torch.arange(4, device=x.device), "CUDA")
        x = ones()
        assert torch.ops.emulation_tests.plus_arange(x).tolist() == [1, 2, 3, 4]
        graph, y = capture(lambda: torch.ops.emulation_tests.plus_arange(x))
        x.fill_(2)
        graph.replay()
        assert y.tolist() == [2, 3, 4, 5]
        assert y.is_cuda


def test_a_host_read_inside_a_custom_operation_is_seen(capture):
    with torch.library._scoped_library("emulation_tests", "FRAGMENT") as library:
        library.define("scaled(Tensor x) -> Tensor")
        library.impl("scaled", lambda x: x * max(x.tolist()), "CPU")
        x = ones()
        with pytest.raises(CaptureError, match="tolist"):
            capture(lambda: torch.ops.emulation_tests.scaled(x))


def test_a_failed_capture_restores_outside_memory(capture):
    x = ones()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError), torch.cuda.graph(graph):
        x.add_(1).sum().item()
    assert x.tolist() == [1] * 4
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    again, y = capture(lambda: x + 1)
    again.replay()
    assert y.tolist() == [2] * 4


def test_a_capture_that_raises_a_python_error_restores_outside_memory(capture):
    x = ones()
    with pytest.raises(ZeroDivisionError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1 / len(x.add_(1)[:0]))
    assert x.tolist() == [1] * 4
    assert capture(lambda: x + 1)[0] is not None


def test_a_caught_error_still_loses_the_capture(capture):
    x = ones()

    def run():
        try:
            x.sum().item()
        except CaptureError:
            return x + 1

    with pytest.raises(CaptureError, match="previous error during capture"):
        capture(run)


def test_rollback_can_be_turned_off():
    with emulated_cuda(Policy(rollback=False)):
        x = ones()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(1)
        assert x.tolist() == [2] * 4


def test_rollback_leaves_memory_that_died_during_the_capture_alone():
    inputs = [ones(4096)]
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        inputs[0].add_(1)
        inputs.clear()
    fresh = torch.zeros(4096, device="cuda")
    assert fresh.sum() == 0


def test_growing_used_memory_inside_a_capture_is_refused(capture):
    x = ones()

    def run():
        y = x + 1
        x.resize_(4096)
        return y

    with pytest.raises(CaptureError, match="resiz"):
        capture(run)


def test_a_fresh_tensor_may_be_resized_inside_a_capture(capture):
    x = ones()

    def run():
        out = torch.empty(0, device="cuda")
        torch.add(x, 1, out=out)
        return out

    graph, y = capture(run)
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5] * 4


def test_a_graph_is_captured_once_until_it_is_reset(capture):
    x = ones()
    graph, _ = capture(lambda: x * 2)
    with pytest.raises(RuntimeError, match="already owns a captured graph"), torch.cuda.graph(graph):
        x.mul_(3)
    graph.reset()
    with torch.cuda.graph(graph):
        y = x * 5
    graph.replay()
    assert y.tolist() == [5] * 4


def test_graphs_do_not_nest(capture):
    x = ones()
    inner, _ = capture(lambda: x * 2)
    with pytest.raises(CaptureError):
        capture(inner.replay)
    with pytest.raises(CaptureError):
        capture(lambda: capture(lambda: x * 2))
    assert capture(lambda: x * 2)[0] is not None


def test_capture_wants_a_stream_of_its_own():
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_capture_begin_and_end_work_without_the_context_manager():
    x = ones()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        y = F.silu(x)
        graph.capture_end()
    graph.replay()
    assert torch.equal(y, F.silu(x))


def test_a_graph_holds_for_replays_after_the_context_is_left():
    with emulated_cuda():
        x = ones()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
    graph.replay()
    assert y.tolist() == [2] * 4


def test_an_operation_that_raises_in_a_replay_is_reported_with_the_line_that_recorded_it(capture):
    """Nothing but the replay stands in the traceback: the line at fault ran long before."""
    table, at = ones(4), torch.zeros(2, dtype=torch.int64, device="cuda")

    def captured():
        before = table * 2
        taken = table.index_select(0, at)  # this line
        return before, taken + 1

    graph, _ = capture(captured)
    graph.replay()
    at.fill_(7)
    with pytest.raises((IndexError, RuntimeError)) as raised:
        graph.replay()
    site = raised.value.site
    assert (site.function, site.line) == ("captured", captured.__code__.co_firstlineno + 2)
    assert f"recorded at {site}" in raised.value.__notes__[0]
    assert "index_select" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    "make",
    [
        "x.clone()", "x[0, 0].clone()", "x.t().clone()", "x[:1].expand(3, 4).clone()", "x.half()", "x.t().double()",
        "x.masked_fill(x > 1, 7.0)", "x[:1].masked_fill(x > 1, 7.0)", "x[0, 0].masked_fill(x[0, 0] > -9, 7.0)",
        "torch.full((3, 4), 2.5, device='cuda')", "torch.full((), 2.5, device='cuda')", "x.bool()",
        "torch.zeros(3, device='cuda')", "x.t().reshape(-1)",
    ],
)  # fmt: skip
def test_a_replay_into_memory_that_is_there_gives_what_the_operation_gives(make, capture):
    x = torch.arange(12.0, device="cuda").view(3, 4)
    graph, y = capture(lambda: eval(make, {"x": x, "torch": torch}))
    x.neg_().add_(3)
    for _ in range(2):
        graph.replay()
        wanted = eval(make, {"x": x, "torch": torch})
        assert (y.dtype, y.stride()) == (wanted.dtype, wanted.stride())
        assert torch.equal(y, wanted)


def test_views_in_place_turn_the_tensor_once_and_not_on_every_replay(capture):
    x = torch.arange(6.0, device="cuda").view(2, 3)

    def run():
        y = x * 1
        before = y + 0
        y.t_()
        return before, y + 0

    graph, (before, after) = capture(run)
    for _ in range(3):
        x.add_(1)
        graph.replay()
        assert torch.equal(before, x)
        assert torch.equal(after, x.t())
