"""A small serving loop: one correct version, and ten with a planted bug. An ordinary CUDA program: a GPU runs it too.

Two graphs (batch sizes 4 and 2) are captured into one pool and replayed with other batches each time, eager steps with
new requests between; every step is compared with an eager run of the correct loop on a separate runner.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cuda"
GROUPS, WIDTH, PAGE, VOCABULARY, MAX_LEN, PAGES = 4, 16, 16, 97, 64, 64
HIDDEN = GROUPS * WIDTH
TOLERANCE = 1e-3

Batch = namedtuple("Batch", "new cached requests")
"""Per request: number of new tokens, number of cached tokens, and index among the 8 requests."""


class Correct:
    """Plans batches and looks tokens up in the cache. Memory that a graph reads is allocated once and refreshed in
    place."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.graphs: dict[int, Any] = {}
        self.scratch: Tensor | None = None

    def host_metadata(self, batch: Batch, tokens: int) -> tuple[list[int], list[int], list[list[int]], list[int]]:
        """(offsets of the new tokens, lengths, page tables, slots of the new tokens), slots padded by 0 to `tokens`."""
        cumulative = [0]
        for count in batch.new:
            cumulative.append(cumulative[-1] + count)
        lengths = [cached + new for cached, new in zip(batch.cached, batch.new, strict=True)]
        pages = [self.runner.pages[request] for request in batch.requests]
        slots = [
            self.runner.pages[request][position // PAGE] * PAGE + position % PAGE
            for request, cached, length in zip(batch.requests, batch.cached, lengths, strict=True)
            for position in range(cached, length)
        ]
        return cumulative, lengths, pages, slots + [0] * (tokens - len(slots))

    def fill(self, metadata: Any, batch: Batch) -> None:
        """Refresh `metadata` in place for `batch`."""
        values = self.host_metadata(batch, metadata.slots.numel())
        for tensor, value in zip((metadata.cu, metadata.lens, metadata.table, metadata.slots), values, strict=True):
            tensor.copy_(torch.tensor(value, dtype=tensor.dtype))

    def new_metadata(self, batch_size: int, tokens: int) -> Any:
        """Zeroed device tensors for `batch_size` requests and `tokens` new tokens; int32, slots int64."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=DEVICE)

        return SimpleNamespace(
            cu=zeros(batch_size + 1),
            lens=zeros(batch_size),
            table=zeros(batch_size, MAX_LEN // PAGE),
            slots=zeros(tokens, dtype=torch.int64),
            max_new=tokens,
            max_len=MAX_LEN,
        )

    def workspace(self, size: int) -> Tensor:
        """Scratch of at least `size` float32, one for all graphs and eager steps."""
        if self.scratch is None:
            self.scratch = torch.zeros(1 << 16, device=DEVICE)
        return self.scratch

    def plan_eager(self, batch: Batch) -> None:
        """Prepare an eager step: new metadata, bounds from the batch."""
        self.metadata = self.new_metadata(len(batch.new), sum(batch.new))
        self.fill(self.metadata, batch)
        self.metadata.max_new = max(batch.new)
        self.metadata.max_len = _longest(batch)
        self.workspace(sum(batch.new) * HIDDEN)

    def plan_capture(self, batch: Batch) -> None:
        """Prepare a capture: metadata that the graph will read, bounds that hold for every later batch."""
        self.metadata = self.graphs[len(batch.new)] = self.new_metadata(len(batch.new), sum(batch.new))
        self.fill(self.metadata, batch)
        self.workspace(sum(batch.new) * HIDDEN)

    def plan_replay(self, batch: Batch) -> None:
        """Prepare a replay: refresh the graph's metadata in place."""
        self.metadata = self.graphs[len(batch.new)]
        self.fill(self.metadata, batch)

    def max_len(self) -> int:
        """Number of positions to read, a multiple of PAGE; a host number, so it is a constant of a graph."""
        return int(self.metadata.max_len)

    def look_up(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, and look each q up among its request's positions so far; all (tokens, GROUPS, WIDTH)."""
        metadata, tokens, length = self.metadata, q.shape[0], self.max_len()
        batch_size = metadata.lens.shape[0]
        self.runner.k_cache.view(-1, GROUPS, WIDTH)[metadata.slots] = k
        self.runner.v_cache.view(-1, GROUPS, WIDTH)[metadata.slots] = v
        pages = metadata.table[:, : length // PAGE].long()
        keys = self.runner.k_cache[pages].view(batch_size, length, GROUPS, WIDTH)
        values = self.runner.v_cache[pages].view(batch_size, length, GROUPS, WIDTH)
        step = torch.arange(metadata.max_new, device=DEVICE)
        new = metadata.cu[1:] - metadata.cu[:-1]
        row = metadata.cu[:-1, None] + step
        queries = q[row.clamp(max=tokens - 1).long()]
        scores = torch.einsum("bqgw,bpgw->bgqp", queries, keys) * WIDTH**-0.5
        position = (metadata.lens - new)[:, None] + step
        hidden = torch.arange(length, device=DEVICE) > position[:, :, None]
        weights = scores.masked_fill(hidden[:, None], -1e9).softmax(-1)
        output = torch.einsum("bgqp,bpgw->bqgw", weights, values)
        assert self.scratch is not None
        scratch = self.scratch[: (tokens + 1) * HIDDEN].view(tokens + 1, GROUPS, WIDTH)  # the last row is the dump
        target = torch.where(step < new[:, None], row, tokens).long()
        scratch[target.view(-1)] = output.reshape(-1, GROUPS, WIDTH)
        return scratch[:tokens].clone()


def _longest(batch: Batch) -> int:
    longest = max(cached + new for cached, new in zip(batch.cached, batch.new, strict=True))
    return -(-longest // PAGE) * PAGE


class QueryLengthFrozen(Correct):
    """Uniform counts of new tokens at capture bake max_new; later batches are packed."""

    def plan_capture(self, batch: Batch) -> None:
        """Keep the capture batch's own largest count as the bound."""
        super().plan_capture(batch)
        self.metadata.max_new = max(batch.new)


class MetadataReallocated(Correct):
    """Metadata are new tensors at a replay, instead of copies into the captured ones."""

    def plan_replay(self, batch: Batch) -> None:
        """Allocate new metadata; the old tensors die."""
        old = self.graphs[len(batch.new)]
        self.metadata = self.graphs[len(batch.new)] = self.new_metadata(len(batch.new), old.slots.numel())
        self.fill(self.metadata, batch)


class MetadataReallocatedButKept(MetadataReallocated):
    """Reallocated metadata, whose old tensors are still referenced: no address dangles, but the values are stale."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.kept: list[Any] = []

    def plan_capture(self, batch: Batch) -> None:
        """Keep a second reference to what the graph reads."""
        super().plan_capture(batch)
        self.kept.append(self.metadata)


class MaxLengthBaked(Correct):
    """The capture batch's longest length becomes a constant of the graph."""

    def plan_capture(self, batch: Batch) -> None:
        """Take the bound from the capture batch."""
        super().plan_capture(batch)
        self.metadata.max_len = _longest(batch)


class ReadsLength(Correct):
    """.item() in the captured step."""

    def max_len(self) -> int:
        """The longest length on the device, rounded up to pages."""
        return -(-int(self.metadata.lens.max().item()) // PAGE) * PAGE


class CopiesLengthsToHost(ReadsLength):
    """Length read through .cpu().tolist()."""

    def max_len(self) -> int:
        """The longest length, from a copy of all of them."""
        return -(-max(self.metadata.lens.cpu().tolist()) // PAGE) * PAGE


class WorkspaceGrows(Correct):
    """An eager step with many new tokens replaces the workspace that the graphs use."""

    def workspace(self, size: int) -> Tensor:
        """Scratch memory that is replaced by a larger one when it is too small."""
        size += HIDDEN * 8
        if self.scratch is None or self.scratch.numel() < size:
            self.scratch = None
            self.scratch = torch.zeros(size, device=DEVICE)
        return self.scratch


class BuildsMetadataInForward(Correct):
    """torch.tensor(list, device=...) in the captured step."""

    def look_up(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Copy lengths from the host first."""
        self.metadata.lens = torch.tensor([9] * self.metadata.lens.numel(), dtype=torch.int32, device=DEVICE)
        return super().look_up(q, k, v)


class BranchesOnHostLength(Correct):
    """A Python branch on a host length picks the short-context path while capturing."""

    def _note(self, batch: Batch) -> None:
        self.longest = max(batch.cached) + 1

    def plan_capture(self, batch: Batch) -> None:
        """Remember the longest length of the capture batch on the host."""
        super().plan_capture(batch)
        self._note(batch)

    def plan_replay(self, batch: Batch) -> None:
        """Remember the longest length again; the graph does not read it."""
        super().plan_replay(batch)
        self._note(batch)

    def plan_eager(self, batch: Batch) -> None:
        """Remember the longest length; in eager the branch is decided again."""
        super().plan_eager(batch)
        self._note(batch)

    def max_len(self) -> int:
        """One page for short batches, else the bound."""
        return PAGE if self.longest < PAGE - 1 else int(self.metadata.max_len)


class CopiesFromPinnedTemporary(Correct):
    """A non-blocking copy in the graph from a pinned tensor that dies after the capture."""

    def fill(self, metadata: Any, batch: Batch) -> None:
        """Keep the lengths on the host, too."""
        super().fill(metadata, batch)
        self.lengths = self.host_metadata(batch, metadata.slots.numel())[1]

    def look_up(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Refresh the lengths from pinned memory inside the graph."""
        pinned = torch.tensor(self.lengths, dtype=torch.int32).pin_memory()
        self.metadata.lens.copy_(pinned, non_blocking=True)
        return super().look_up(q, k, v)


class Runner:
    """One layer, one planner, a paged cache of 64 pages of 16 slots, and two graphs that share a pool."""

    def __init__(self, planner: type[Correct]) -> None:
        torch.manual_seed(1)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape) / shape[-1] ** 0.5).to(DEVICE)

        self.embedding = weight(VOCABULARY, HIDDEN)
        self.split = weight(3 * HIDDEN, HIDDEN)
        self.output = weight(HIDDEN, HIDDEN)
        self.to_logits = weight(VOCABULARY, HIDDEN)
        self.k_cache = torch.zeros(PAGES, PAGE, GROUPS, WIDTH, device=DEVICE)
        self.v_cache = torch.zeros_like(self.k_cache)
        self.pages = [[1 + request * 4 + page for page in range(4)] for request in range(8)]
        self.planner = planner(self)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.tokens: dict[int, Tensor] = {}
        self.pool: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (tokens, VOCABULARY) float32 of the planned batch."""
        x = self.embedding[tokens]
        q, k, v = F.linear(x, self.split).view(-1, 3, GROUPS, WIDTH).unbind(1)
        x = x + F.linear(self.planner.look_up(q, k, v).reshape(-1, HIDDEN), self.output)
        return F.linear(x, self.to_logits)

    def token_ids(self, batch: Batch) -> Tensor:
        """The batch's new tokens on the host, int64, the same for every runner."""
        generator = torch.Generator().manual_seed(sum(batch.cached) * 31 + len(batch.cached))
        return torch.randint(0, VOCABULARY, (sum(batch.new),), generator=generator)

    def eager(self, batch: Batch) -> Tensor:
        """Logits of one step without a graph."""
        self.planner.plan_eager(batch)
        return self.forward(self.token_ids(batch).to(DEVICE))

    def capture(self, batch: Batch) -> None:
        """Warm up on a side stream, then capture a graph for batches of this size."""
        size = len(batch.new)
        self.tokens[size] = torch.zeros(sum(batch.new), dtype=torch.long, device=DEVICE)
        self.planner.plan_capture(batch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.forward(self.tokens[size])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            output = self.forward(self.tokens[size])
        self.pool = self.pool or graph.pool()
        self.graphs[size] = (graph, output)

    def replay(self, batch: Batch) -> Tensor:
        """Logits of one step by the graph of this batch size, copied out of its output."""
        size = len(batch.new)
        self.tokens[size].copy_(self.token_ids(batch))
        self.planner.plan_replay(batch)
        graph, output = self.graphs[size]
        graph.replay()
        return output.clone()


CAPTURED = (Batch([2] * 4, [5] * 4, [0, 1, 2, 3]), Batch([1] * 2, [5] * 2, [0, 1]))
STEPS: tuple[tuple[str, Batch | None], ...] = (
    ("eager", Batch([9, 14, 6, 11], [0] * 4, [0, 1, 2, 3])),
    ("graph", Batch([2] * 4, [9, 14, 6, 11], [0, 1, 2, 3])),
    ("graph", Batch([1, 4, 2, 1], [11, 16, 8, 13], [0, 1, 2, 3])),
    ("eager", Batch([40, 40, 30], [0] * 3, [4, 5, 6])),
    ("bystanders", None),
    ("graph", Batch([1, 1], [40, 30], [5, 6])),
    ("graph", Batch([3, 1, 3, 1], [40, 20, 10, 14], [4, 1, 2, 3])),
    ("graph", Batch([1] * 2, [12, 13], [0, 2])),
    ("graph", Batch([2] * 4, [43, 21, 13, 41], [4, 1, 2, 5])),
)
_BYSTANDER_SIZES = (1024,) * 6 + (576, 640, 768, 1024, 1088, 2048)


def drive(planner: type[Correct]) -> str:
    """Return `pass`, `capture error`, or the wrong steps, as a test that compares results would see them."""
    with torch.no_grad():
        runner, reference = Runner(planner), Runner(Correct)
        try:
            for batch in CAPTURED:
                runner.capture(batch)
        except Exception as error:
            return f"capture error: {type(error).__name__}"
        runner.k_cache.zero_()
        runner.v_cache.zero_()
        return _run_steps(runner, reference)


def _run_steps(runner: Runner, reference: Runner) -> str:
    wrong: list[str] = []
    bystanders: list[Tensor] = []
    for number, (kind, batch) in enumerate(STEPS):
        if batch is None:
            bystanders = [torch.full((size,), 7.0, device=DEVICE) for size in _BYSTANDER_SIZES]
            continue
        want = reference.eager(batch)
        try:
            got = runner.eager(batch) if kind == "eager" else runner.replay(batch)
            torch.cuda.synchronize()
        except Exception as error:
            return "; ".join([*wrong, f"step {number}: {type(error).__name__}"])
        logits = (got - want).abs().max().item()
        cache = (runner.k_cache[1:] - reference.k_cache[1:]).abs().max().item()
        if not logits < TOLERANCE:
            wrong.append(f"step {number}: logits off by {logits:.2g}")
        if not cache < TOLERANCE:
            wrong.append(f"step {number}: cache off by {cache:.2g}")
    damaged = sum(int((tensor != 7).any()) for tensor in bystanders)
    if damaged:
        wrong.append(f"{damaged} unrelated tensors overwritten")
    return "; ".join(wrong) if wrong else "pass"


_PLANNERS: tuple[type[Correct], ...] = (
    Correct,
    QueryLengthFrozen,
    MetadataReallocated,
    MetadataReallocatedButKept,
    MaxLengthBaked,
    ReadsLength,
    CopiesLengthsToHost,
    WorkspaceGrows,
    BuildsMetadataInForward,
    BranchesOnHostLength,
    CopiesFromPinnedTemporary,
)
LOOPS: dict[str, Callable[[], str]] = {planner.__name__: functools.partial(drive, planner) for planner in _PLANNERS}
