"""What a capture takes without the dispatcher is what the dispatcher would have shown, and no host read hides in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_on_cpu import CaptureError, EmulationError, HostSyncError, emulated_cuda, functions, shortcuts

X = torch.arange(12.0).view(3, 4) - 5
INTS = torch.arange(12).view(3, 4)
INDEX = torch.tensor([2, 0])


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((str(func), args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def names_of(calls: list[Any]) -> list[str]:
    return [f"{number}-{func.__name__}" for number, (func, _) in enumerate(calls)]


def plain(value: Any) -> Any:
    """`value` in a form that `==` compares."""
    if isinstance(value, Tensor):
        return (value.dtype, value.size(), value.stride(), value.data_ptr())
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def shown(func: Any, args: tuple[Any, ...], mode: Any = torch.no_grad) -> list[Any]:
    with mode(), Seen() as seen:
        func(*args)
    return [(name, plain(args), kwargs) for name, args, kwargs in seen.calls]


BITS = (Tensor.__and__, Tensor.__or__)
ARITHMETIC = [func for func in shortcuts._BINARY if func not in BITS]
CALLS = [
    *[(func, (X, X)) for func in ARITHMETIC],
    *[(func, (X, number)) for func in ARITHMETIC for number in (2, 2.5)],
    *[(func, (INTS, INTS)) for func in shortcuts._BINARY],
    *[(func, (INTS, 3)) for func in shortcuts._BINARY],
    *[(func, (INTS,)) for func in shortcuts._UNARY],
    *[(func, (X, dim)) for func in shortcuts._OF_ONE_DIMENSION for dim in (0, -1)],
    *[(func, (X, -1)) for func in shortcuts._SOFTMAX],
    *[(func, (tensor,)) for func in shortcuts._CASTS for tensor in (X, INTS)],
    *[(Tensor.to, (tensor, dtype)) for tensor in (X, INTS) for dtype in (torch.float32, torch.float16)],
    (Tensor.masked_fill, (X, X > 0, 1.5)),
    (Tensor.__getitem__, (X, INDEX)),
    (Tensor.__getitem__, (X, INDEX.int())),
    (Tensor.__getitem__, (X, (INDEX,))),
    (Tensor.__getitem__, (X, (INDEX, INDEX.int()))),
]  # fmt: skip


@pytest.mark.parametrize(("func", "args"), CALLS, ids=names_of(CALLS))
def test_an_operation_that_is_taken_is_the_one_that_the_dispatcher_shows(func, args):
    taken = shortcuts.operation_of(func, args)
    calls = shown(func, args)
    if taken is None:  # nothing to do: a conversion to the type that it has
        assert calls == []
    else:
        op, given, kwargs = taken
        assert [(str(op), plain(given), kwargs)] == calls


PRODUCTS = [
    (Tensor.matmul, (X, X.t())),
    (torch.matmul, (X[None], X.t())),
    (F.linear, (X, X)),
    (F.linear, (X, X, torch.ones(3))),
    (torch.einsum, ("ij,kj->ik", X, X)),
    (torch.einsum, ("ij->ji", [X])),
]


@pytest.mark.parametrize(("func", "args"), PRODUCTS, ids=names_of(PRODUCTS))
def test_a_matrix_product_is_taken_as_what_the_dispatcher_shows_before_it_takes_it_apart(func, args):
    op, given, kwargs = shortcuts.operation_of(func, args)
    assert [(str(op), plain(given), kwargs)] == shown(func, args, torch.inference_mode)


MORE = [
    (Tensor.add, (X, True)),
    (Tensor.masked_fill, (X, X > 0, torch.tensor(1.0))),
    (Tensor.matmul, (INTS, INTS.t())),
    (torch.einsum, ("ij,kj->ik", INTS, INTS)),
    (torch.einsum, ("ij,kj,lj->ikl", X, X, X)),
    (torch.einsum, (X, [0, 1])),
    (F.linear, (X, X, None)),
    (Tensor.__getitem__, (X, X > 0)),
    (Tensor.__getitem__, (X, torch.tensor(1))),
    (Tensor.__getitem__, (X, (INDEX, torch.tensor(1)))),
    (Tensor.__getitem__, (X, (INDEX, X > 0))),
    (Tensor.__getitem__, (X, (INDEX, slice(None)))),
    (Tensor.__getitem__, (X, [0, 1])),
    (Tensor.add, (torch.nn.Parameter(X), X)),
]


@pytest.mark.parametrize(("func", "args"), MORE, ids=names_of(MORE))
def test_what_is_more_than_one_plain_operation_is_not_taken(func, args):
    assert shortcuts.operation_of(func, args) is None


VIEWED = [
    (Tensor.view, (X, 4, 3)),
    (Tensor.view, (X, (2, 6))),
    (Tensor.view, (X, torch.int32)),
    (Tensor.as_strided, (X, (2, 2), (4, 1), 1)),
    (Tensor.transpose, (X, 0, 1)),
    (Tensor.permute, (X, 1, 0)),
    (Tensor.unsqueeze, (X, 0)),
    (Tensor.squeeze, (X[None],)),
    (Tensor.expand, (X[None], 2, -1, -1)),
    (Tensor.select, (X, 0, 1)),
    (Tensor.narrow, (X, 0, 1, 2)),
    (Tensor.t, (X,)),
    (Tensor.unbind, (X, 1)),
    (Tensor.diagonal, (X,)),
    (Tensor.unfold, (X, 1, 2, 2)),
    (Tensor.movedim, (X, 0, 1)),
    (Tensor.swapaxes, (X, 0, 1)),
    (Tensor.swapdims, (X, 0, 1)),
    (Tensor.detach, (X,)),
    (Tensor.__getitem__, (X, (0, None, slice(1, 3), ...))),
    (Tensor.__getitem__, (X, -1)),
]


@pytest.mark.parametrize(("func", "args"), VIEWED, ids=names_of(VIEWED))
def test_what_only_looks_returns_the_memory_of_its_argument(func, args):
    assert shortcuts.only_looks(func, args)
    result = func(*args)
    for each in result if isinstance(result, tuple) else (result,):
        assert each.untyped_storage()._cdata == X.untyped_storage()._cdata


def test_every_function_that_is_said_to_look_was_tried():
    assert {func for func, _ in VIEWED} == shortcuts.VIEWS | {Tensor.__getitem__}


@pytest.mark.parametrize(
    "read",
    [
        "x[:n]", "x[n]", "x[0, :n]", "x.narrow(0, n, 1)", "x.view(n, -1)", "x.view((n, -1))", "x.expand(n, 4)",
        "x.reshape(n, -1)", "x.reshape((n, -1))", "x.t().reshape(n, -1)", "x.select(0, n)", "x[x > 0]",
    ],
)  # fmt: skip
def test_a_host_read_in_an_argument_is_refused(read):
    with torch.no_grad(), emulated_cuda():
        names = {"x": torch.ones(3, 4, device="cuda"), "n": torch.tensor(3, device="cuda")}
        if "narrow" in read or "select" in read or "[n]" in read:
            names["n"] = torch.tensor(1, device="cuda")
        with pytest.raises(CaptureError, match="not permitted"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            eval(read, names)
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(HostSyncError):
            eval(read, names)


def _program(x: Tensor, index: Tensor) -> list[Tensor]:
    rows = x[index].float().reshape(2, 2, 2)
    mixed = rows.transpose(0, 1).reshape(2, -1) * 2 + 1
    hidden = mixed > 3
    weights = torch.softmax(mixed.masked_fill(~hidden | (mixed <= 5), 0.5), -1)
    return [weights, hidden.any(1), index.cumsum(0), mixed.clone().half(), x[:, 1:3].unsqueeze(0)]


def _products(x: Tensor, _: Tensor) -> list[Tensor]:
    return [x @ x.t(), F.linear(x[None], x), torch.einsum("ij,kj->ik", x, x), torch.einsum("ij->ji", x).clone()]


def _recorded(mode: Any, program: Any = _program) -> tuple[list[Any], list[Tensor]]:
    with mode(), emulated_cuda():
        x = torch.arange(12.0).view(3, 4).cuda().half()
        index = torch.tensor([2, 0]).cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = program(x, index)
        graph.replay()
        nodes = [(type(node).__name__, node.name, node.site.line, len(node.blocks)) for node in graph.recorded.nodes]
        return nodes, [output.cpu() for output in outputs]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_capture_records_the_same_with_and_without_shortcuts(mode, monkeypatch):
    nodes, outputs = _recorded(mode)
    monkeypatch.setattr(functions, "_shortcut", lambda *_: NotImplemented)
    others, wanted = _recorded(mode)
    assert nodes == others
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))


def test_matrix_products_are_one_operation_each_with_and_without_shortcuts(monkeypatch):
    nodes, outputs = _recorded(torch.inference_mode, _products)
    assert [name for _, name, _, _ in nodes] == [
        "aten.matmul.default", "aten.linear.default", "aten.einsum.default", "aten.clone.default"
    ]  # fmt: skip
    monkeypatch.setattr(functions, "_shortcut", lambda *_: NotImplemented)
    others, wanted = _recorded(torch.inference_mode, _products)
    assert nodes == others
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("product", ["x @ x", "F.linear(x, x)", "torch.einsum('ij,jk->ik', x, x)"])
def test_no_product_hides_that_cuda_multiplies_no_integers(product, mode):
    with mode(), emulated_cuda():
        names = {"x": torch.ones(3, 3, dtype=torch.int64, device="cuda"), "torch": torch, "F": F}
        with pytest.raises(EmulationError, match="not implemented for Long"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            eval(product, names)


def test_a_dispatch_mode_of_the_program_sees_what_runs_in_its_capture():
    with torch.no_grad(), emulated_cuda():
        x = torch.ones(4, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()), Seen() as seen:
            x.view(2, 2).add(1)
    assert [name for name, _, _ in seen.calls] == ["aten.view.default", "aten.add.Tensor"]
