"""`torch.cuda.CUDAGraph` on a CPU: what a capture recorded, the memory it uses, and what is checked before it runs
again."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from attn_testkit.emulation import rules, session
from attn_testkit.emulation.errors import CaptureError, DanglingMemoryError
from attn_testkit.emulation.memory import Block, Pool, PoolHandle, new_handle, pool_for
from attn_testkit.emulation.policy import Policy
from attn_testkit.emulation.private import disable_functions, disable_modes, same_generator
from attn_testkit.emulation.program import CallNode, DropNode, Node, Step, compile_program
from attn_testkit.emulation.recorder import Recorder
from attn_testkit.emulation.sites import Site, author_site
from attn_testkit.emulation.streams import Stream, StreamContext, check_joined

# The Triton interpreter leaves reference cycles that hold its arguments; a collection before the first replays frees
# what is dead.
_COLLECT_BEFORE_REPLAYS = 2


class EmulatedGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._keep_graph = keep_graph
        self._generators: list[torch.Generator] = []
        self._clear()

    def _clear(self) -> None:
        self.nodes: list[Node] = []
        self.blocks: dict[int, Block] = {}
        self.failed = False
        self.captured = False
        self.replays = 0
        self.policy = Policy()
        self._pool: Pool | None = None
        self._live: list[Block] = []
        self._checked: list[Block] = []
        self._program: list[Step] = []
        self._clobbers: list[Block] = []
        self._recorder: Recorder | None = None
        self._origin: Stream | None = None
        self._joined: list[tuple[Stream, Site]] = []
        self._has_calls = False

    # ---- the interface of torch.cuda.CUDAGraph

    def capture_begin(
        self, pool: PoolHandle | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        current = session.require()
        if current.capture is not None:
            current.refuse(rules.NESTED_REPLAY, "CUDAGraph.capture_begin()")
        if self.captured:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        if current.stream.cuda_stream == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them"
                " on the default stream.)"
            )
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(
                f'Unknown capture error mode. Expected "global", "thread_local" or "relaxed", got {capture_error_mode}'
            )
        gc.collect()
        self._clear()
        self.policy = current.policy
        self._pool = pool_for(tuple(pool) if pool is not None else new_handle())  # type: ignore[arg-type]
        self._clobbers = self._pool.reusable()
        self._origin = current.stream
        self._origin.capture, self._origin.seen = self, {}
        current.capture = self
        self._recorder = Recorder(current, self)
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        current = session.require()
        if current.capture is not self:
            raise RuntimeError("capture_end() without a capture_begin() of the same graph")
        error = self._stop_capture()
        if error is not None:
            self._discard()
            raise error
        assert self._pool is not None
        self._pool.graphs.add(self)
        self.captured = True
        self._checked = [block for block in self.blocks.values() if not block.in_pool] + self._live
        self._has_calls = any(isinstance(node, CallNode) for node in self.nodes)
        self._program = compile_program(self.nodes, self.policy.fill)

    def abandon_capture(self) -> None:
        """End a capture whose program raised: undo its effects and forget it."""
        if session.require().capture is self:
            self._stop_capture()
            self._discard()

    def _stop_capture(self) -> CaptureError | None:
        current = session.require()
        assert self._recorder is not None
        assert self._origin is not None
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        current.capture = self._recorder = None
        self.retire_dropped_blocks()
        error = check_joined(self._origin, self._joined)
        for stream in [self._origin, *(stream for stream, _ in self._joined)]:
            stream.capture, stream.seen = None, {}
        for block in self.blocks.values():  # kernels do not run during a capture on CUDA: undo what they did here
            if block.in_pool:
                block.fill(self.policy.fill)
            else:
                block.restore()
        if self.failed:
            return CaptureError(
                "CUDAGraph.capture_end()",
                author_site(),
                "CUDA would report 'operation failed due to a previous error during capture': an error inside the"
                " capture was caught and ignored",
                "repair the operation that raised first; a capture does not survive it",
            )
        return error

    def _discard(self) -> None:
        pool = self._pool
        self._clear()
        self._pool = pool

    def instantiate(self) -> None:
        self._require_captured("instantiate")

    def replay(self) -> None:
        current = session.current()
        if current is not None and current.capture is not None:
            current.refuse(rules.NESTED_REPLAY, "CUDAGraph.replay()")
        self._require_captured("replay")
        if self._has_calls and self.replays < _COLLECT_BEFORE_REPLAYS:
            gc.collect()
        self.check_memory()
        for block in self._clobbers:
            block.fill(self.policy.fill)
        with torch.inference_mode(), disable_modes(), disable_functions():
            for step in self._program:
                step()
        self.replays += 1

    def reset(self) -> None:
        """Forget the graph and give its pool memory back."""
        self._clear()

    def pool(self) -> PoolHandle:
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool.handle

    def register_generator_state(self, generator: torch.Generator) -> None:
        self._generators.append(generator)

    def enable_debug_mode(self) -> None:
        """Accepted; there is nothing to dump."""

    def debug_dump(self, debug_path: str) -> None:
        with open(debug_path, "w", encoding="utf-8") as file:
            file.writelines(f"// {node.name} at {node.site}\n" for node in self.nodes)

    def raw_cuda_graph(self) -> int:
        self._require_captured("raw_cuda_graph")
        return id(self)

    def raw_cuda_graph_exec(self) -> int:
        return self.raw_cuda_graph()

    # ---- what the recorder needs

    def knows_generator(self, generator: torch.Generator) -> bool:
        return any(same_generator(known, generator) for known in (*self._generators, *torch.cuda.default_generators))

    def join(self, stream: Stream) -> None:
        """`stream` waits for captured work: what it does next belongs to the capture."""
        if stream.capture is not self:
            stream.capture, stream.seen = self, {}
            self._joined.append((stream, author_site()))

    def block(self, tensor: Tensor, *, in_pool: bool = False) -> Block:
        storage = tensor.untyped_storage()
        block = self.blocks.get(storage._cdata)
        if block is None:
            block = self.blocks[storage._cdata] = Block(storage, in_pool=in_pool)
            if in_pool:
                self._live.append(block)
        return block

    def about_to_write(self, tensor: Tensor) -> None:
        if self.policy.rollback:
            self.block(tensor).save()

    def retire_dropped_blocks(self) -> None:
        """Note pool blocks that the program does not refer to any more; from there on their content is undefined."""
        kept = []
        for block in self._live:
            if not block.unreferenced():
                kept.append(block)
                continue
            block.dead = True
            if not self.captured:
                self.nodes.append(DropNode("end of a temporary", block.site, [block], self.policy.poison_temporaries))
        self._live = kept

    # ---- before a replay

    def check_memory(self) -> None:
        """Raise, or patch (policy "poison"), where memory that this graph uses is gone."""
        for block in self._checked:
            trouble = block.trouble()
            if trouble is None:
                continue
            users = [node for node in self.nodes if block in node.blocks and not isinstance(node, DropNode)]
            if not users:
                continue
            if self.policy.dangling == "error":
                raise _dangling(block, trouble, users)
            block.replace_by_filled_buffer(0xFF if self.policy.fill is None else self.policy.fill)

    def _require_captured(self, what: str) -> None:
        if not self.captured:
            raise RuntimeError(f"Called CUDAGraph::{what} without a preceding successful capture.")


def _dangling(block: Block, trouble: str, users: list[Node]) -> DanglingMemoryError:
    first = users[0]
    return DanglingMemoryError(
        f"replay of {first.name}" + (f" and {len(users) - 1} more" if len(users) > 1 else ""),
        first.site,
        f"the graph would use {block.nbytes} bytes that were {trouble} after the capture (allocated at {block.site});"
        " on a GPU they may belong to somebody else by then",
        "allocate it once, in the constructor or init_cuda_graph_state, keep it, and refresh it in place with copy_",
    )


class graph:
    """Stands in for `torch.cuda.graph(g, pool=..., stream=...)`."""

    def __init__(
        self,
        cuda_graph: EmulatedGraph,
        pool: PoolHandle | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
        **_: Any,
    ) -> None:
        self.cuda_graph = cuda_graph
        self.pool = pool
        self.capture_stream = stream or session.require().capture_stream
        self.capture_error_mode = capture_error_mode
        self.stream_ctx = StreamContext(self.capture_stream)

    def __enter__(self) -> None:
        self.stream_ctx.__enter__()
        try:
            self.cuda_graph.capture_begin(self.pool, self.capture_error_mode)
        except BaseException:
            self.stream_ctx.__exit__()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.cuda_graph.capture_end()
            else:
                self.cuda_graph.abandon_capture()
        finally:
            self.stream_ctx.__exit__()
