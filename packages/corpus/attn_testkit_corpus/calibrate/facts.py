"""Small programs about graphs themselves: pools, outputs, resets, caught errors. Each returns one short line."""

# mypy: disable-error-code="arg-type,func-returns-value"

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

DEVICE = "cuda"


def _capture(run: Callable[[], Tensor], pool: object = None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = run()
    return graph, output


def _attempt(run: Callable[[], object]) -> str:
    try:
        run()
        torch.cuda.synchronize()
    except Exception:
        return "error"
    return "no error"


def _ones(n: int = 4) -> Tensor:
    return torch.ones(n, device=DEVICE)


def kernels_do_not_run_during_capture() -> str:
    """Values of x before and after one replay of `x.add_(1)`: 1 and 2 if the captured add did not run."""
    x = _ones()
    graph, _ = _capture(lambda: x.add_(1))
    before = x[0].item()
    graph.replay()
    return f"before {before:g}, after one replay {x[0].item():g}"


def output_keeps_its_address() -> str:
    """Show whether an output keeps the address of its capture in a replay."""
    x = _ones()
    graph, y = _capture(lambda: x + 1)
    address = y.data_ptr()
    graph.replay()
    return str(y.data_ptr() == address)


def dropped_output_is_reused_by_the_next_graph() -> str:
    """Effect of replaying B (same pool) on an output of A that was dropped before B was captured."""
    x = _ones(1024)
    outputs: dict[str, Tensor] = {}
    a, outputs["a"] = _capture(lambda: x * 2)
    watch = torch.zeros(1, device=DEVICE)
    reader, _ = _capture(lambda: watch.copy_(outputs["a"][:1]))
    a.replay()
    reader.replay()
    first = watch.item()
    del outputs["a"]
    b, outputs["b"] = _capture(lambda: x * 3, pool=a.pool())
    b.replay()
    reader.replay()
    return "kept" if watch.item() == first else "clobbered"


def live_output_survives_the_next_graph() -> str:
    """Effect of replaying B (same pool) on an output of A that is still referred to."""
    x = _ones(1024)
    a, y = _capture(lambda: x * 2)
    b, _z = _capture(lambda: x * 3, pool=a.pool())
    a.replay()
    b.replay()
    return "kept" if y[0].item() == 2 else "clobbered"


def output_outlives_its_graph() -> str:
    """Contents of an output after its graph was reset and deleted."""
    x = _ones()
    graph, y = _capture(lambda: x * 2)
    graph.replay()
    graph.reset()
    del graph
    return f"{y[0].item():g}"


def replay_after_reset() -> str:
    """Show whether a graph that was reset refuses to run."""
    x = _ones()
    graph, _ = _capture(lambda: x * 2)
    graph.reset()
    return _attempt(graph.replay)


def capture_twice() -> str:
    """Show whether a graph that holds a capture refuses a second one."""
    x = _ones()
    graph, _ = _capture(lambda: x * 2)

    def again() -> None:
        with torch.cuda.graph(graph):
            x.mul_(3)

    return _attempt(again)


def capture_after_reset() -> str:
    """Show whether a graph that was reset can be captured and replayed again."""
    x = _ones()
    graph, _ = _capture(lambda: x * 2)
    graph.reset()

    def again() -> None:
        with torch.cuda.graph(graph):
            x.mul_(3)
        graph.replay()

    return _attempt(again)


def replay_before_capture() -> str:
    """Show whether a graph that was never captured refuses to run."""
    return _attempt(torch.cuda.CUDAGraph().replay)


def replay_inside_a_capture() -> str:
    """Show whether a capture survives the replay of another graph inside it."""
    x = _ones()
    inner, _ = _capture(lambda: x * 2)
    return _attempt(lambda: _capture(lambda: (inner.replay(), x * 3)[1]))


def caught_item_in_a_capture() -> str:
    """Show whether a capture survives an `.item()` whose error the program swallows."""

    def run() -> Tensor:
        x = _ones()
        with contextlib.suppress(Exception):
            x.sum().item()
        return x + 1

    return _attempt(lambda: _capture(run))


def caught_unpinned_copy_in_a_capture() -> str:
    """Show whether a capture survives a copy from unpinned memory whose error the program swallows: torch refuses it
    before CUDA is asked.
    """
    x = _ones()

    def run() -> Tensor:
        with contextlib.suppress(Exception):
            x.copy_(torch.zeros(4))
        return x + 1

    return _attempt(lambda: _capture(run)[0].replay())


def caught_python_error_in_a_capture() -> str:
    """Show whether a capture survives an exception that has nothing to do with CUDA."""
    x = _ones()

    def run() -> Tensor:
        try:
            raise ValueError("nothing to do with CUDA")
        except ValueError:
            return x + 1

    return _attempt(lambda: _capture(run)[0].replay())


def capture_on_the_default_stream() -> str:
    """Show whether `capture_begin` refuses the default stream."""
    graph = torch.cuda.CUDAGraph()
    return _attempt(lambda: graph.capture_begin())


def reseed_with_another_seed_in_a_capture() -> str:
    """Show whether `torch.cuda.manual_seed` with a new seed is refused in a capture."""
    torch.cuda.manual_seed(1)
    return _attempt(lambda: _capture(lambda: (torch.cuda.manual_seed(2), _ones())[1]))


def reseed_with_the_same_seed_in_a_capture() -> str:
    """Show whether `torch.cuda.manual_seed` with the seed that is set is refused in a capture."""
    torch.cuda.manual_seed(1)
    return _attempt(lambda: _capture(lambda: (torch.cuda.manual_seed(1), _ones())[1]))


def registered_generator() -> str:
    """Show whether a generator that was registered with the graph can draw in its capture."""
    generator = torch.Generator(device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)

    def run() -> None:
        with torch.cuda.graph(graph):
            torch.rand(4, device=DEVICE, generator=generator)
        graph.replay()

    return _attempt(run)


def default_generator_gives_new_numbers() -> str:
    """Show whether two replays of `torch.rand` draw different numbers."""
    graph, y = _capture(lambda: torch.rand(8, device=DEVICE))
    graph.replay()
    first = y.clone()
    graph.replay()
    return "new numbers" if not torch.equal(first, y) else "the same numbers"


def input_resized_after_capture() -> str:
    """Result of a graph that reads the old address of a resized tensor."""
    x = _ones(4)
    graph, y = _capture(lambda: x * 2)
    graph.replay()
    x.resize_(1 << 20).fill_(5.0)
    state = _attempt(graph.replay)
    return state if state == "error" else "stale" if y[0].item() != 10 else "followed"


def grown_inside_a_capture() -> str:
    """Show whether an input may be resized, and so moved, by the captured program."""
    x = _ones(4)

    def run() -> Tensor:
        x.resize_(1 << 10)
        return x.fill_(3.0)

    return _attempt(lambda: _capture(run)[0].replay())


def zero_size_tensors() -> str:
    """Show whether operations on tensors without elements can be captured and replayed."""
    x = torch.zeros(0, 4, device=DEVICE)
    return _attempt(lambda: _capture(lambda: x + 1)[0].replay())


def empty_capture() -> str:
    """Show whether a graph without a kernel can be replayed."""
    return _attempt(lambda: _capture(lambda: torch.empty(0, device=DEVICE))[0].replay())


def capture_under_sync_debug() -> str:
    """Show whether a capture and its replay trip sync debug mode."""
    x = _ones()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph, _ = _capture(lambda: x + 1)
        return _attempt_without_wait(graph.replay)
    except Exception:
        return "error"
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _attempt_without_wait(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception:
        return "error"
    return "no error"


def device_synchronize_under_sync_debug() -> str:
    """Show whether `torch.cuda.synchronize` trips sync debug mode."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return _attempt_without_wait(torch.cuda.synchronize)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def stream_synchronize_under_sync_debug() -> str:
    """Show whether `Stream.synchronize` trips sync debug mode."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return _attempt_without_wait(torch.cuda.current_stream().synchronize)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def inference_capture_replayed_outside() -> str:
    """Result of a graph captured in inference mode and replayed outside: x = 1, `x.add_(1) * 2`."""
    with torch.inference_mode():
        x = _ones()
        graph, y = _capture(lambda: x.add_(1) * 2)
    graph.replay()
    return f"{y[0].item():g}"


FACTS: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        kernels_do_not_run_during_capture,
        output_keeps_its_address,
        dropped_output_is_reused_by_the_next_graph,
        live_output_survives_the_next_graph,
        output_outlives_its_graph,
        replay_after_reset,
        capture_twice,
        capture_after_reset,
        replay_before_capture,
        replay_inside_a_capture,
        caught_item_in_a_capture,
        caught_unpinned_copy_in_a_capture,
        caught_python_error_in_a_capture,
        capture_on_the_default_stream,
        reseed_with_another_seed_in_a_capture,
        reseed_with_the_same_seed_in_a_capture,
        registered_generator,
        default_generator_gives_new_numbers,
        input_resized_after_capture,
        grown_inside_a_capture,
        zero_size_tensors,
        empty_capture,
        capture_under_sync_debug,
        device_synchronize_under_sync_debug,
        stream_synchronize_under_sync_debug,
        inference_capture_replayed_outside,
    )
}
