"""`torch.cuda.CUDAGraph` on a CPU: a capture, the calls of its replay, and what is checked before they run."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
from typing import Any

import torch

from cuda_on_cpu import rules, session
from cuda_on_cpu.capture import Capture
from cuda_on_cpu.errors import CaptureError, DanglingMemoryError
from cuda_on_cpu.graph_accesses import Touched, Watched, tell, tell_shared, touched_by, watched_steps
from cuda_on_cpu.late_work import late_branches
from cuda_on_cpu.memory import Block
from cuda_on_cpu.pools import Pool, PoolHandle, new_handle, pool_for
from cuda_on_cpu.private import disable_functions, disable_modes
from cuda_on_cpu.program import CallNode, DropNode, Node, Step, compile_program
from cuda_on_cpu.recorder import Recorder
from cuda_on_cpu.sites import author_site
from cuda_on_cpu.stream_order import StreamOrder
from cuda_on_cpu.stream_state import DEFAULT_STREAM_HANDLE, CaptureStreams, Clock, StreamState
from cuda_on_cpu.streams import StreamContext, fork_error

# The Triton interpreter leaves reference cycles that hold its arguments; a collection before the first replays frees
# what is dead.
_COLLECT_BEFORE_REPLAYS = 2


class EmulatedGraph:
    """The emulated `torch.cuda.CUDAGraph`. `recorded` holds the captured operations; None before a capture, and after a
    reset."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._keep_graph = keep_graph
        self._generators: list[torch.Generator] = []
        self._clear()

    def _clear(self) -> None:
        self.recorded: Capture | None = None
        self._replays = 0
        self._pool: Pool | None = None
        self._checked: list[Block] = []
        self._program: list[Step] = []
        self._sources: list[Node] = []
        self._clobbers: list[Block] = []
        self._recorder: Recorder | None = None
        self._has_calls = False
        self._touched: list[Touched] | None = None
        self._watched: dict[int, Watched] = {}
        self._work: Clock = {}
        self._late_on: int | None = None
        """The stream on which a replay has not begun yet."""

    def capture_begin(
        self, pool: PoolHandle | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """Record the work of this thread on the current stream, and on streams that wait for it, until `capture_end`.

        `pool` is a handle from `pool()` or `torch.cuda.graph_pool_handle()`; None: its own pool. Raises
        CaptureError inside another capture; RuntimeError, as torch does, on the default stream, for a graph that is
        captured already, and for an unknown `capture_error_mode` (the known ones behave alike).
        """
        current = session.require()
        if current.capture is not None:
            current.refuse(rules.NESTED_REPLAY, "CUDAGraph.capture_begin()")
        if self._captured() is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        if current.stream.cuda_stream == DEFAULT_STREAM_HANDLE:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them"
                " on the default stream.)"
            )
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(
                f'Unknown capture error mode. Expected "global", "thread_local" or "relaxed", got {capture_error_mode}'
            )
        current.late.catch_up()
        self._clear()
        self._pool = pool_for(tuple(pool) if pool is not None else new_handle())  # type: ignore[arg-type]
        if self._pool.captures:
            gc.collect()  # what only garbage refers to is nobody's
        self._clobbers = self._pool.reusable()
        self.recorded = Capture(current.policy, CaptureStreams(current.stream), self._generators)
        self.recorded.order = None if current.order is None else current.new_account()
        current.begin_capture(self.recorded, self.abandon_capture)
        self._recorder = Recorder(current, self.recorded)
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """End the capture: memory outside the pool has its earlier contents, and the graph can be replayed.

        Raises CaptureError, and discards the capture, if CUDA would have lost it or a side stream was not joined;
        RuntimeError without a `capture_begin` of this graph.
        """
        capture = self.recorded
        if capture is None or session.require().capture is not capture:
            raise RuntimeError("capture_end() without a capture_begin() of the same graph")
        error = self._stop_recording(capture)
        if error is not None:
            self._discard()
            raise error
        assert self._pool is not None
        capture.ended = True
        if capture.policy.side_streams == "late":
            capture.nodes = late_branches(capture.nodes, capture.stamps, capture.streams.origin.cuda_stream)
        self._pool.captures.add(capture)
        self._checked = capture.blocks_to_check()
        self._has_calls = any(isinstance(node, CallNode) for node in capture.nodes)
        self._program, self._sources = compile_program(capture.nodes, capture.policy.fill)

    def abandon_capture(self) -> None:
        """Undo and forget the capture of a program that raised. Does nothing unless this graph is capturing."""
        capture = self.recorded
        if capture is not None and session.require().capture is capture:
            self._stop_recording(capture)
            self._discard()

    def _stop_recording(self, capture: Capture) -> CaptureError | None:
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._recorder = None
        session.require().end_capture()
        capture.retire_dropped_blocks()
        error = fork_error(capture.streams)
        capture.streams.release()
        capture.order = None
        capture.undo()
        if capture.failed:
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
        """Raises RuntimeError before a successful capture; otherwise there is nothing to do."""
        self._require_captured("instantiate")

    def replay(self) -> None:
        """Run the recorded operations again on the same memory, with the host values of the capture.

        Raises DanglingMemoryError, before anything runs, if memory that they use is gone (policy "poison": they get a
        private buffer of fill bytes); CaptureError inside a capture; RuntimeError before a successful capture.
        """
        current = session.current()
        if current is not None and current.capture is not None:
            current.refuse(rules.NESTED_REPLAY, "CUDAGraph.replay()")
        capture = self._require_captured("replay")
        if current is not None:
            if self._late_on not in (None, current.stream.cuda_stream):
                current.late.catch_up_on(self._late_on)  # CUDA runs the launches of one graph one after another
            if current.delays(functools.partial(self._replay, capture)):
                self._late_on = current.stream.cuda_stream
                return
        self._replay(capture)

    def _replay(self, capture: Capture) -> None:
        current, self._late_on = session.current(), None
        if self._has_calls and self._replays < _COLLECT_BEFORE_REPLAYS:
            gc.collect()
        if _replace_what_is_gone(self._checked, capture):
            self._program, self._sources = compile_program(capture.nodes, capture.policy.fill)
            self._touched = None
        order = None if current is None else current.order
        if order is not None and current is not None:
            self._tell(order, current.stream.cuda_stream, capture)
        for block in self._clobbers:
            block.fill(capture.policy.fill)
        steps = iter(self._program)
        try:
            with torch.inference_mode(), disable_modes(), disable_functions():
                if order is not None and current is not None and self._watched:
                    for step, node in zip(steps, self._sources, strict=True):
                        watched = self._watched.get(id(node))
                        if watched is None:
                            step()
                        else:
                            watched(order, current.stream.cuda_stream, step)
                for step in steps:
                    step()
        except Exception as error:
            _say_where(error, self._sources[-1 - operator.length_hint(steps)])
            raise
        if order is not None and current is not None:
            self._work = order.mark(current.stream.cuda_stream)
        self._replays += 1
        if current is not None:
            current.before = None

    def _tell(self, order: StreamOrder, stream: int, capture: Capture) -> None:
        """Report a replay to the order of streams, before it runs."""
        if self._touched is None:
            self._touched, self._watched = touched_by(capture.nodes), watched_steps(self._sources)
        order.wait(stream, self._work)  # CUDA runs the launches of one graph one after another
        assert self._pool is not None
        if len(self._pool.captures) > 1:
            own = [block for block in capture.blocks.values() if block.in_pool]
            tell_shared(order, own, self._clobbers if own else (), stream)
        tell(order, self._checked, self._touched, stream)

    def reset(self) -> None:
        """Forget the graph and give its pool memory back."""
        current = session.current()
        if current is not None:
            current.late.catch_up()
        self._clear()

    def pool(self) -> PoolHandle:
        """The handle of the graph's memory pool. Raises RuntimeError before the first capture and after a reset."""
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool.handle

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Allow `generator` in captures of this graph; every replay then draws new numbers from it."""
        self._generators.append(generator)

    def enable_debug_mode(self) -> None:
        """Do nothing: there is nothing to dump."""

    def debug_dump(self, debug_path: str) -> None:
        """Write the recorded operations to `debug_path`, one per line with the author's line, instead of a DOT
        graph."""
        nodes = self.recorded.nodes if self.recorded is not None else []
        with open(debug_path, "w", encoding="utf-8") as file:
            file.writelines(f"// {node.name} at {node.site}\n" for node in nodes)

    def raw_cuda_graph(self) -> int:
        """Number of this graph in this process; not a pointer. Raises RuntimeError before a capture."""
        self._require_captured("raw_cuda_graph")
        return id(self)

    def raw_cuda_graph_exec(self) -> int:
        """The same number as `raw_cuda_graph`."""
        return self.raw_cuda_graph()

    def _captured(self) -> Capture | None:
        return self.recorded if self.recorded is not None and self.recorded.ended else None

    def _require_captured(self, what: str) -> Capture:
        capture = self._captured()
        if capture is None:
            raise RuntimeError(f"Called CUDAGraph::{what} without a preceding successful capture.")
        return capture


def _say_where(error: Exception, node: Node) -> None:
    """Add the line that recorded the operation to an error of a replay, whose traceback has only the line of the
    replay."""
    error.add_note(f"in the replay of {node.name}, recorded at {node.site}")
    with contextlib.suppress(AttributeError, TypeError):
        error.site = node.site  # type: ignore[attr-defined]


def _replace_what_is_gone(blocks: list[Block], capture: Capture) -> bool:
    """Replace freed memory of `capture` by other buffers (policy "poison"). Returns True if any was replaced.

    Raises DanglingMemoryError under the policy "error".
    """
    replaced = False
    for block in blocks:
        trouble = block.trouble()
        if trouble is None:
            continue
        users = [node for node in capture.nodes if block in node.blocks and not isinstance(node, DropNode)]
        if not users:
            continue
        if capture.policy.dangling == "error":
            raise _dangling(block, trouble, users)
        capture.disown(block)
        block.replace_by_filled_buffer(0xFF if capture.policy.fill is None else capture.policy.fill)
        replaced = True
    return replaced


def _dangling(block: Block, trouble: str, users: list[Node]) -> DanglingMemoryError:
    first = users[0]
    return DanglingMemoryError(
        f"replay of {first.name}" + (f" and {len(users) - 1} more" if len(users) > 1 else ""),
        first.site,
        f"the graph would use {block.nbytes} bytes that were {trouble} after the capture (allocated at {block.site});"
        " on a GPU they may belong to somebody else by then",
        "allocate it once, before the capture, where the state of the graphs is set up; keep it, and refresh it in"
        " place with copy_",
    )


class AcceleratorGraph(EmulatedGraph):
    """The emulated `torch.accelerator.Graph`: `with stream, graph:` captures the block. It raises the errors of the
    two."""

    def __init__(
        self, keep_graph: bool = False, *, pool: PoolHandle | None = None, capture_error_mode: str = "default"
    ) -> None:
        super().__init__(keep_graph)
        self.graph_pool, self.capture_error_mode = pool, capture_error_mode

    def capture_begin(
        self, pool: PoolHandle | None = None, capture_error_mode: str = "default", check_input_liveness: bool = False
    ) -> None:
        """Call `CUDAGraph.capture_begin` with the pool and the mode that the graph was made with."""
        mode = self.capture_error_mode if capture_error_mode == "default" else capture_error_mode
        super().capture_begin(pool or self.graph_pool, "global" if mode == "default" else mode)

    def __enter__(self) -> AcceleratorGraph:
        self.capture_begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.capture_end()
        else:
            self.abandon_capture()


class graph:
    """The emulated `torch.cuda.graph(g, pool=..., stream=...)`: captures the block into `g`, on `stream` or a stream of
    its own. Raises what `CUDAGraph.capture_begin` and `capture_end` raise; a block that raises discards the capture."""

    def __init__(
        self,
        cuda_graph: EmulatedGraph,
        pool: PoolHandle | None = None,
        stream: StreamState | None = None,
        capture_error_mode: str = "global",
        **_: Any,
    ) -> None:
        self.cuda_graph = cuda_graph
        self.pool = pool
        self.capture_stream = stream or session.require().capture_stream
        self.capture_error_mode = capture_error_mode
        self.stream_ctx = StreamContext(self.capture_stream)

    def __enter__(self) -> None:
        order = session.require().keeps_order
        if order is not None:
            order.device_waited_for()  # torch synchronises the device here
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
