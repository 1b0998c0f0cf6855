"""Record of one capture: operations, the memory they use, the streams they ran on. It is plain state, which a recorder
fills and a graph replays."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from cuda_on_cpu.memory import Block, give_back_free_memory
from cuda_on_cpu.policy import Policy
from cuda_on_cpu.private import same_generator, use_count
from cuda_on_cpu.program import DropNode, Node
from cuda_on_cpu.stream_order import StreamOrder
from cuda_on_cpu.stream_state import CaptureStreams, Clock, StreamState

SHARED = 1 << 20
"""Smallest size of a block that may reuse dropped memory."""

_FREED = 1 << 28
"""Freed bytes after which the heap is trimmed, because its pieces no longer fit blocks of the same size."""


class Capture:
    """One capture, from its beginning until its graph is reset or dies.

    `nodes` are in the order of the program, `blocks` by the identity of their storage. `failed`: CUDA would have lost
    the capture. `ended`: it became a graph, and nothing is recorded any more. `order`: the order of its branches, if
    the program has its own streams. `stamps`: streams of operations, and the work before them, by the identity of the
    node; kept if branches may be late.
    """

    __slots__ = (
        "__weakref__", "_free", "_generators", "_given_back", "_live", "_order", "blocks", "ended", "failed", "nodes",
        "order", "policy", "stamps", "streams",
    )  # fmt: skip

    def __init__(self, policy: Policy, streams: CaptureStreams, generators: list[torch.Generator]) -> None:
        self.policy = policy
        self.streams = streams
        self.nodes: list[Node] = []
        self.blocks: dict[int, Block] = {}
        self.order: StreamOrder | None = None
        self.stamps: dict[int, tuple[int, Clock]] = {}
        self.failed = False
        self.ended = False
        self._generators = generators
        self._live: dict[int, Block] = {}
        self._order = itertools.count()
        self._free: dict[Block, int] = {}
        self._given_back = 0

    def note_work(self, stream: StreamState, node: Node) -> None:
        """Count a recorded operation as work of its stream."""
        stream.note_work()
        if self.policy.side_streams == "late":
            self.stamps[id(node)] = stream.cuda_stream, dict(stream.seen)

    def knows_generator(self, generator: torch.Generator) -> bool:
        """True if `generator` was registered with the graph, or is a default one."""
        return any(same_generator(known, generator) for known in (*self._generators, *torch.cuda.default_generators))

    def block(self, tensor: Tensor, *, in_pool: bool = False) -> Block:
        """The block of `tensor`'s storage, made at its first use in the capture; `in_pool`: as memory of the
        capture."""
        storage = tensor.untyped_storage()
        block = self.blocks.get(storage._cdata)
        return self._meet(storage, in_pool) if block is None else block

    def _meet(self, storage: torch.UntypedStorage, in_pool: bool) -> Block:
        block = self.blocks[storage._cdata] = Block(storage, next(self._order), in_pool=in_pool)
        if in_pool:
            self._live[block.key] = block
        return block

    def about_to_write(self, tensor: Tensor) -> None:
        """Save the contents of `tensor`'s memory, so that `undo` can restore them."""
        if self.policy.rollback:
            self.block(tensor).save()

    def retire_dropped_blocks(self) -> None:
        """Mark pool blocks that the program no longer refers to; from there on their content is undefined."""
        if 1 not in map(use_count, self._live):  # the graph itself is the last
            return
        for key, block in list(self._live.items()):
            if use_count(key) == 1:
                del self._live[key]
                block.dead = True
                if not self.ended:
                    # The tensors that moved cannot be read any more.
                    poison = not self._share_memory(block) and self.policy.poison_temporaries
                    self.nodes.append(DropNode("end of a temporary", block.place, [block], poison))

    def _share_memory(self, block: Block) -> bool:
        """Move a dropped block to memory that had been dropped before the block was made. Returns True if it was moved.

        So a graph holds the memory that was live at the same time, as with CUDA's allocator, not all its temporaries.
        """
        if block.nbytes < SHARED or not block.movable:
            return False
        fit = [free for free, since in self._free.items() if since < block.number and free.nbytes >= block.nbytes]
        place = min(fit, key=lambda free: free.nbytes, default=block)
        moved = place is not block
        if moved:
            block.move_into(place)
            del self.blocks[block.key]
            self._given_back += block.nbytes
            if self._given_back > _FREED:
                self._given_back = 0
                give_back_free_memory()
        self._free[place] = next(self._order)
        return moved

    def disown(self, block: Block) -> None:
        """Ignore drops of `block` by the program from now on: its memory has moved."""
        self._live.pop(block.key, None)

    def undo(self) -> None:
        """Undo the effects of the captured operations, because on CUDA kernels do not run during a capture."""
        for block in self.blocks.values():
            if block.in_pool:
                block.fill(self.policy.fill)
            else:
                block.restore()

    def blocks_to_check(self) -> list[Block]:
        """Memory whose address a replay must check: all memory except pool memory that the program dropped."""
        return [block for block in self.blocks.values() if not block.in_pool] + [*self._live.values()]
