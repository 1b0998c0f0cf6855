"""Public bugs of bounds, races and order, written down again as small programs: each is wrong as reported, or repaired.

``thread`` is where the bug was reported. No code of these projects is used: the programs keep the mechanism alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cuda_on_cpu import EmulationError, RaceError
from cuda_on_cpu.errors import StrayAccessError


@dataclass(frozen=True)
class Bug:
    """A bug: ``run(True)`` is as reported, and must raise ``error`` with ``says``; ``run(False)`` is repaired."""

    thread: str
    run: Callable[[bool], object]
    error: type[Exception]
    says: str


def device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@triton.jit
def mean_of_losses(x, sums, out, plain: tl.constexpr):
    tl.atomic_add(sums, tl.load(x + tl.program_id(0)), sem="relaxed")
    arrived = tl.atomic_add(sums + 1, 1.0, sem="acq_rel") + 1
    if plain:
        arrived = tl.load(sums + 1)
    if arrived == tl.num_programs(0):
        tl.store(out, tl.atomic_add(sums, 0.0) / arrived)


def arrivals_read_plainly(wrong: bool) -> None:
    mean_of_losses[(4,)](device(4) + 1, device(2), device(1), plain=wrong)


@triton.jit
def partial_sums(x, parts, locks, out, released: tl.constexpr, SPLITS: tl.constexpr):
    split = tl.program_id(0)
    if split < SPLITS - 1:
        tl.store(parts + split, tl.load(x + split))
        if released:
            tl.atomic_xchg(locks + split, 1, sem="release")
        else:
            tl.atomic_xchg(locks + split, 1, sem="relaxed")
    else:
        total = tl.load(x + split)
        for other in range(SPLITS - 1):
            while tl.atomic_add(locks + other, 0, sem="acquire") == 0:
                pass
            total += tl.load(parts + other)
        tl.store(out, total)


def contribution_without_release(wrong: bool) -> None:
    partial_sums[(3,)](device(3) + 1, device(3), device(3, dtype=torch.int32), device(1), released=not wrong, SPLITS=3)


@triton.jit
def add_bins(values, bins, out, n, n_bins, stride, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    value = tl.load(values + at, mask=at < n, other=0)
    tl.store(out + at, value + tl.load(bins + at * stride, mask=at < n_bins, other=0), mask=at < n)


def length_of_another_tensor(wrong: bool) -> None:
    bins = whole(10, 0, 11, 0, 12)[::2]
    add_bins[(1,)](whole(1, 2, 3, 4), bins, device(4, dtype=torch.int32), 4, 4 if wrong else 3, 2, TILE=4)


@triton.jit
def gather_pages(table, lens, kv, out, row, WIDTH: tl.constexpr, PAGES: tl.constexpr, guards: tl.constexpr):
    """Two pages at a time: the second may lie behind the row of the table."""
    request = tl.program_id(0)
    pages = tl.load(lens + request)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, pages, 2):
        at = first + tl.arange(0, 2)
        page = (
            tl.load(table + request * row + at, mask=at < pages, other=0)
            if guards
            else tl.load(table + request * row + at)
        )
        rows = kv + page[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        total += tl.sum(tl.load(rows, mask=(at < pages)[:, None], other=0.0), 0)
    tl.store(out + request * WIDTH + tl.arange(0, WIDTH), total)


def block_table_behind_its_end(wrong: bool) -> None:
    table = whole(0, 1, 2, 1, 2, 0).view(2, 3)
    gather_pages[(2,)](table, whole(2, 3), device(3, 8), device(2, 8), 3, WIDTH=8, PAGES=3, guards=not wrong)


@triton.jit
def row_of_slot(kv, slots, out, stride, WIDTH: tl.constexpr, wide: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0))
    if wide:
        slot = slot.to(tl.int64)
    at = tl.arange(0, WIDTH)
    tl.store(out + tl.program_id(0) * WIDTH + at, tl.load(kv + slot * stride + at))


def slot_times_stride(wrong: bool) -> None:
    kv = torch.empty(3, 1 << 30, dtype=torch.uint8, device="cuda")[:, :8]
    row_of_slot[(1,)](kv, whole(2), device(1, 8, dtype=torch.uint8), kv.stride(0), WIDTH=8, wide=not wrong)


@triton.jit
def rows_behind_prefix(prefix, lens, out):
    request = tl.program_id(0)
    tl.store(out + request, tl.load(lens + request) - tl.load(prefix + request))


def prefix_lengths_of_a_smaller_batch(wrong: bool) -> None:
    prefix = whole(1) if wrong else whole(1, 2, 3)
    rows_behind_prefix[(3,)](prefix, whole(4, 5, 6), device(3, dtype=torch.int32))


@triton.jit
def preprocess(out_grad, delta):
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    value = tl.load(out_grad + at)
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(delta + at, value * value)


@triton.jit
def backward(delta, starts, grad, waits: tl.constexpr, waits_late: tl.constexpr):
    if waits:
        tl.extra.cuda.gdc_wait()
    at = tl.load(starts + tl.program_id(0)) + tl.arange(0, 8)
    value = tl.load(delta + at)
    if waits_late:
        tl.extra.cuda.gdc_wait()
    tl.store(grad + at, value)


def backward_without_a_wait(wrong: bool) -> None:
    delta, starts, grad = device(16), whole(0, 8), device(16)
    preprocess[(2,)](device(16), delta)
    backward[(2,)](delta, starts, grad, waits=not wrong, waits_late=False, launch_pdl=True)


@triton.jit
def make_starts(lens, starts):
    tl.store(starts + tl.program_id(0), tl.load(lens + tl.program_id(0)))


def metadata_read_before_the_wait(wrong: bool) -> None:
    starts, delta, grad = whole(0, 0), device(16), device(16)
    make_starts[(2,)](whole(0, 8), starts)
    backward[(2,)](delta, starts, grad, waits=not wrong, waits_late=True, launch_pdl=True)


def accepted_counts_read_at_once(wrong: bool) -> list[int]:
    accepted, host = whole(1, 3, 2), torch.zeros(3, dtype=torch.int32).pin_memory()
    host.copy_(accepted, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    if not wrong:
        done.synchronize()
    return host.tolist()  # type: ignore[no-any-return]


def page_table_staged_in_one_buffer(wrong: bool) -> None:
    staging = [torch.zeros(4, dtype=torch.int32).pin_memory() for _ in range(2)]
    table = device(4, dtype=torch.int32)
    for step in range(2):
        host = staging[0 if wrong else step]
        host.fill_(step + 1)
        table.copy_(host, non_blocking=True)
    torch.cuda.synchronize()


def pinned_pointers_of_a_graph(wrong: bool) -> None:
    host, out, graph = torch.arange(4.0).pin_memory(), device(4), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(host, non_blocking=True)
    graph.replay()
    if not wrong:
        torch.cuda.synchronize()
    host.fill_(9)
    torch.cuda.synchronize()


def request_table_written_under_a_forward(wrong: bool) -> None:
    forward, table = torch.cuda.Stream(), device(4, 8, dtype=torch.int32)
    rows = torch.tensor([1, 2], device="cuda")
    table[rows] = 1
    forward.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(forward):
        read = table[rows] + 0
    if not wrong:
        torch.cuda.current_stream().wait_stream(forward)
    table[torch.tensor([2], device="cuda")] = 7
    torch.cuda.synchronize()
    del read


def copy_to_the_host_beside_a_forward(wrong: bool) -> None:
    write, kv = torch.cuda.Stream(), device(4, 8)
    host = torch.zeros(4, 8).pin_memory()
    kv.add_(1)
    if not wrong:
        write.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(write):
        host.copy_(kv, non_blocking=True)
    torch.cuda.synchronize()


BUGS = (
    Bug("FlagGems #6257", arrivals_read_plainly, RaceError, "of sums"),
    Bug("triton #10594; Fuser #2391", contribution_without_release, RaceError, "of parts"),
    Bug("triton #10336", length_of_another_tensor, StrayAccessError, "past the end of bins"),
    Bug("vLLM #50852", block_table_behind_its_end, StrayAccessError, "past the end of table"),
    Bug("sglang #9344", slot_times_stride, StrayAccessError, "before the start of kv"),
    Bug("sglang #4100", prefix_lengths_of_a_smaller_batch, StrayAccessError, "past the end of prefix"),
    Bug("flash-attention #2498", backward_without_a_wait, RaceError, "memory of delta that triton kernel preprocess"),
    Bug("quack #206", metadata_read_before_the_wait, RaceError, "memory of starts that triton kernel make_starts"),
    Bug("vLLM #36013", accepted_counts_read_at_once, EmulationError, "tolist"),
    Bug("TensorRT-LLM #15546; vLLM #31841", page_table_staged_in_one_buffer, EmulationError, "pinned"),
    Bug("onnxruntime #32121", pinned_pointers_of_a_graph, EmulationError, "pinned"),
    Bug("sglang #18746", request_table_written_under_a_forward, EmulationError, "stream"),
    Bug("sglang #20611", copy_to_the_host_beside_a_forward, EmulationError, "stream"),
)
