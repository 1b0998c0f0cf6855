"""Accesses of a replay, for the account of streams: memory of the graph that the program can reach, and its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch._ops import OpOverload

from attn_testkit.emulation.accesses import Access, Span, access_of, accesses_of
from attn_testkit.emulation.memory import Block
from attn_testkit.emulation.private import disable_functions, storage_from_weak
from attn_testkit.emulation.program import Node, OpNode
from attn_testkit.emulation.stream_order import StreamOrder
from attn_testkit.emulation.tags import DEVICE


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
    yield from accesses_of(node.what, node.args, node.kwargs)
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
