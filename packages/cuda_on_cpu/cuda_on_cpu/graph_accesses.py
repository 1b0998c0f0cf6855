"""Accesses of a replay, for the order of streams: memory of the graph that the program can reach, and its inputs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor
from torch._ops import OpOverload

from cuda_on_cpu.accesses import Access, Span, access_of, accesses_of, has_chosen_places
from cuda_on_cpu.memory import Block
from cuda_on_cpu.private import disable_functions, storage_from_weak
from cuda_on_cpu.program import Node, OpNode
from cuda_on_cpu.stream_order import StreamOrder
from cuda_on_cpu.tags import DEVICE, PINNED


class Touched(NamedTuple):
    """An access of a replay: start of its storage, and the range that is touched."""

    start: int
    access: Access
    what: str


def touched_by(nodes: Iterable[Node]) -> list[Touched]:
    """Different accesses of the recorded operations. Kernel launches report theirs when they run."""
    found: dict[tuple[int, Access], Touched] = {}
    with disable_functions():
        for node in nodes:
            if isinstance(node, OpNode):
                for tensor, access in _accesses(node):
                    start = tensor.untyped_storage().data_ptr()
                    found.setdefault((start, access), Touched(start, access, f"replay of {node.name} at {node.site}"))
    return list(found.values())


def _accesses(node: OpNode) -> Iterable[tuple[Tensor, Access]]:
    assert isinstance(node.what, OpOverload)
    yield from accesses_of(node.what, node.args, node.kwargs, chosen=False)
    for _, output in node.fresh:
        access = access_of(output, writes=True)
        if access is not None:
            yield output, access


def tell(order: StreamOrder, blocks: Iterable[Block], touched: Iterable[Touched], stream: int) -> None:
    """Report a replay as work of `stream`. Raises EmulationError if another stream's work collides with it."""
    for block in blocks:
        storage = block.owner if block.weak is None else storage_from_weak(block.weak)
        if storage is not None and block.nbytes and block.key in DEVICE.entries:
            order.knows(storage)
        elif storage is not None and block.nbytes and order.arrivals.pending:
            order.arrivals.arrive_in(Access(block.address, block.address + block.nbytes, Span.SOME, False))
    for each in touched:
        order.touch_address(each.start, each.access, stream, each.what)


Watched = Callable[[StreamOrder, int, Callable[[], object]], None]
"""Function that runs a step of a replay on a stream, and reports accesses that are known only then."""


def watched_steps(nodes: Iterable[Node]) -> dict[int, Watched]:
    """Nodes with more to report than their accesses, by their identity."""
    found: dict[int, Watched] = {}
    for node in nodes:
        if not isinstance(node, OpNode) or not isinstance(node.what, OpOverload):
            continue
        if node.what._schema.name == "aten::copy_" and len(node.blocks) == 2:
            target, source = (block.key in PINNED.entries for block in node.blocks)
            if source and not target:
                found[id(node)] = functools.partial(_copy_from_host, node)
            elif target and not source:
                found[id(node)] = functools.partial(_copy_to_host, node)
        elif has_chosen_places(node.what):
            found[id(node)] = functools.partial(_chosen, node)
    return found


def _copy_from_host(node: OpNode, order: StreamOrder, stream: int, step: Callable[[], object]) -> None:
    block, source = node.blocks[1], node.args[1]
    if block.weak is not None and source.is_contiguous():
        order.arrivals.arrive_in(Access(source.data_ptr(), source.data_ptr() + source.nbytes, Span.SOME, False))
        order.copies.read(block.weak, source.data_ptr(), source.nbytes, f"replay of {node.name}", node.place)
    step()


def _copy_to_host(node: OpNode, order: StreamOrder, stream: int, step: Callable[[], object]) -> None:
    block, target = node.blocks[0], node.args[0]
    first, size = target.data_ptr(), target.nbytes
    before = ctypes.string_at(first, size)
    step()
    if block.weak is not None and target.is_contiguous():
        order.holds_back_at(block.weak, first, before, stream, f"replay of {node.name}")


def _chosen(node: OpNode, order: StreamOrder, stream: int, step: Callable[[], object]) -> None:
    assert isinstance(node.what, OpOverload)
    for tensor, access in accesses_of(node.what, node.args, node.kwargs, chosen=True):
        start = tensor.untyped_storage().data_ptr()
        order.touch_address(start, access, stream, f"replay of {node.name} at {node.site}")
    step()


def tell_shared(order: StreamOrder, own: Iterable[Block], others: Iterable[Block], stream: int) -> None:
    """Report a replay's memory in a pool that other graphs use too. Raises EmulationError like ``tell``.

    `others`: memory that the other graphs dropped, and that a device may assign to this graph.
    """
    for block in (*own, *others):
        if block.owner is not None and block.nbytes:
            order.knows(block.owner)
    for block in others:
        access = Access(block.address, block.address + block.nbytes, Span.ALL, True)
        order.touch_address(block.address, access, stream, "replay of a graph that shares its memory pool with another")
