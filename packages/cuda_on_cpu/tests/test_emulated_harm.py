"""A wrong program corrupts nothing: after any error the process is healthy and the next capture works."""

from __future__ import annotations

import pytest
import torch

from cuda_on_cpu import emulated_cuda

pytestmark = pytest.mark.usefixtures("cuda")


def _free_input(x, capture):
    inputs = [x.clone()]
    graph, _ = capture(lambda: len(inputs[0].add_(1)))
    inputs.clear()
    graph.replay()


def _resize_input(x, capture):
    y = x.clone()
    graph, _ = capture(lambda: y.add_(1))
    y.resize_(1 << 16)
    graph.replay()


def _replace_storage(x, capture):
    y = x.clone()
    graph, _ = capture(lambda: y.add_(1))
    y.untyped_storage().resize_(0)
    graph.replay()


def _resize_output(x, capture):
    graph, y = capture(lambda: x + 1)
    y.resize_(1 << 16)
    graph.replay()


def _shrink_output_storage(x, capture):
    graph, y = capture(lambda: x + 1)
    y.untyped_storage().resize_(0)
    graph.replay()


def _out_of_range(x, capture):
    index = torch.tensor([0, 1], device="cuda")
    graph, _ = capture(lambda: x[index])
    index.fill_(1_000_000)
    graph.replay()


def _wrong_shape(x, capture):
    capture(lambda: x.add_(1) + torch.ones(3, device="cuda"))


def _host_read(x, capture):
    capture(lambda: x.add_(1).sum().item())


def _python_error(x, capture):
    capture(lambda: (x.add_(1), {}["missing"]))


def _die_in_capture(x, capture):
    inputs = [x.clone()]
    capture(lambda: (inputs[0].add_(1), inputs.clear(), x.sum().item()))


def _reset_and_use(x, capture):
    graph, outputs = capture(lambda: [x + 1])
    reader, _ = capture(lambda: outputs[0] * 2)
    outputs.clear()
    graph.reset()
    reader.replay()


def _unjoined(x, capture):
    side = torch.cuda.Stream()

    def run():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    capture(run)


def _nested_capture(x, capture):
    capture(lambda: capture(lambda: x.add_(1)))


def _mixed(x, capture):
    capture(lambda: x.add_(torch.ones(8)))


WRONG = (
    _free_input,
    _resize_input,
    _replace_storage,
    _resize_output,
    _shrink_output_storage,
    _out_of_range,
    _wrong_shape,
    _host_read,
    _python_error,
    _die_in_capture,
    _reset_and_use,
    _unjoined,
    _nested_capture,
    _mixed,
)


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__.strip("_"))
def test_after_a_wrong_program_memory_is_intact_and_the_next_capture_works(program, capture):
    x = torch.ones(8, device="cuda")
    bystanders = [torch.full((8,), 7.0, device="cuda") for _ in range(64)]
    with pytest.raises((RuntimeError, IndexError, KeyError)):
        program(x, capture)
    bystanders += [torch.full((1 << 12,), 7.0, device="cuda") for _ in range(8)]
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream().cuda_stream == 0
    assert x.tolist() == [1] * 8
    graph, y = capture(lambda: x * 2)
    graph.replay()
    assert y.tolist() == [2] * 8
    assert all((tensor == 7).all() for tensor in bystanders)


def test_an_error_in_one_context_leaves_none_in_the_next():

    def fail() -> None:
        with emulated_cuda():
            torch.cuda.set_sync_debug_mode("error")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert torch.ones(1, device="cuda").item() == 1
