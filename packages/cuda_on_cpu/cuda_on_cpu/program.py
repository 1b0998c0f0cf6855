"""The program of a replay, made from recorded operations: a list of ready calls with bound arguments."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cuda_on_cpu import quick_kernels
from cuda_on_cpu.arguments import tensors_in
from cuda_on_cpu.memory import Block
from cuda_on_cpu.private import direct_call, disable_functions
from cuda_on_cpu.sites import Site, Spot, site_of

Step = Callable[[], object]
Call = Callable[..., Any]


@dataclass(slots=True)
class Node:
    """One action that a replay repeats, named by `what`, recorded at `place`. `blocks` is every memory it touches."""

    what: object
    place: Spot | Site
    blocks: list[Block] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Torch's name of the operation."""
        return str(self.what)

    @property
    def site(self) -> Site:
        """Line that recorded the operation."""
        return site_of(self.place)

    def step(self, fill: int | None) -> Step | None:
        """Make the ready call for a replay, None if there is nothing to do; `fill` is the policy's byte."""
        raise NotImplementedError


@dataclass(slots=True)
class OpNode(Node):
    """The torch operation `what`. `fresh` are (position among the outputs, where the graph keeps it)."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    fresh: list[tuple[int, Tensor]] = field(default_factory=list)

    def step(self, fill: int | None) -> Step | None:
        """Make the operation, with its new outputs written to the graph's memory (by out= if there is one)."""
        op = self.what
        assert isinstance(op, OpOverload)
        run = direct_call(op)
        if not self.fresh:
            return functools.partial(run, *self.args, **self.kwargs)
        if len(self.fresh) == 1 and _returns_one_tensor(op):
            return _into(self.fresh[0][1], op, self.args, self.kwargs)
        return functools.partial(_run_and_copy_each, self.fresh, run, self.args, self.kwargs)


@dataclass(slots=True)
class AllocationNode(Node):
    """A torch.empty, which runs no kernel on CUDA. The contents of its memory are undefined, so a replay gives it the
    fill byte."""

    def step(self, fill: int | None) -> Step | None:
        """Fill the new memory; None without a fill byte."""
        return _filler(self.blocks[0], fill)


@dataclass(slots=True)
class DropNode(Node):
    """The point after which the captured program no longer refers to this pool memory."""

    poison: bool = True

    def step(self, fill: int | None) -> Step | None:
        """A step that fills the dropped memory; None without a fill byte, or if the policy keeps temporaries."""
        return _filler(self.blocks[0], fill) if self.poison else None


@dataclass(slots=True)
class CallNode(Node):
    """A Triton launch or another ready call."""

    call: Step | None = None

    def step(self, fill: int | None) -> Step | None:
        """Return `call` unchanged."""
        return self.call


def compile_program(nodes: list[Node], fill: int | None) -> tuple[list[Step], list[Node]]:
    """The calls of one replay, in order, and the action that each repeats."""
    with disable_functions():
        calls = [(step, node) for node in nodes if (step := node.step(fill)) is not None]
    return [step for step, _ in calls], [node for _, node in calls]


def _filler(block: Block, fill: int | None) -> Step | None:
    # The graph owns pool memory, and a replay starts by checking that nobody resized what is still reachable: the bare
    # address is safe.
    if fill is None or not block.nbytes or not block.in_pool:
        return None
    return functools.partial(ctypes.memset, block.address, fill, block.nbytes)


def _into(target: Tensor, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """`op` with its only result in `target`."""
    in_place = _IN_PLACE.get(op)
    if in_place is not None:
        return in_place(target, *args)
    into = _out_variant(op)
    if into is not None and target.dim():  # some out= forms disagree about results without dimensions
        kept = {key: value for key, value in kwargs.items() if key in into.arguments}
        return functools.partial(into.run, *args, **kept, **{into.out: target})
    return functools.partial(_run_and_copy, target, direct_call(op), args, kwargs)


# The out= forms of these make their result in new memory, and copy it.
_IN_PLACE: dict[OpOverload, Callable[..., Step]] = {
    torch.ops.aten.clone.default: lambda target, source: functools.partial(target.copy_, source),
    torch.ops.aten.full.default: lambda target, size, value: functools.partial(target.fill_, value),
    torch.ops.aten.zeros.default: lambda target, size: target.zero_,
    **quick_kernels.INTO,
}


def _run_and_copy(target: Tensor, run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    target.copy_(run(*args, **kwargs))


def _run_and_copy_each(
    fresh: list[tuple[int, Tensor]], run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    outputs: list[Tensor] = []
    tensors_in((run(*args, **kwargs),), outputs)
    for position, target in fresh:
        target.copy_(outputs[position])


@functools.cache
def _returns_one_tensor(op: OpOverload) -> bool:
    returns = op._schema.returns
    return len(returns) == 1 and returns[0].type.kind() == "TensorType"


@dataclass(frozen=True)
class _OutVariant:
    run: Call
    out: str
    arguments: frozenset[str]


_PLACEMENT = frozenset({"dtype", "layout", "device", "pin_memory"})


@functools.cache
def _out_variant(op: OpOverload) -> _OutVariant | None:
    """The overload with the same arguments plus one `out=` tensor, so that a replay needs no copy."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    # a factory's out= form takes the dtype from the tensor; in a conversion the dtype is the operation itself
    loose = [a for a in wanted if a[0] not in _PLACEMENT] if op._schema.name != "aten::_to_copy" else wanted
    for name in op.overloadpacket.overloads():
        candidate: OpOverload = getattr(op.overloadpacket, name)
        arguments = candidate._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        given = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if len(outs) == 1 and given in (wanted, loose):
            return _OutVariant(direct_call(candidate), outs[0], frozenset(a.name for a in arguments))
    return None
