"""How the kit uses a device's allocator: it poisons free blocks, reserves no memory for that, and returns idle
blocks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.messages import RunRecord

from attn_testkit.checks.failures import from_exception
from attn_testkit.graphs.allocator import give_back_idle_memory
from attn_testkit.graphs.poison import Canaries, churn
from attn_testkit.running.case_runs.worker_main import given_up
from attn_testkit.running.processes.device_memory import filled_by_others

KIB, MIB = 1 << 10, 1 << 20


class CachingAllocator:
    """As the device's: requests up to 1 MiB from segments of 2 MiB, others from segments of 20 MiB, best fit."""

    def __init__(self) -> None:
        self.segments: list[dict[str, Any]] = []
        self.private: list[dict[str, Any]] = []

    def reserve(self, kind: str) -> dict[str, Any]:
        size = 2 * MIB if kind == "small" else 20 * MIB
        blocks = [{"size": size, "state": "inactive"}]
        segment = {"segment_type": kind, "segment_pool_id": (0, 0), "stream": 0, "blocks": blocks}
        self.segments.append(segment)
        return segment

    def empty(self, count: int, dtype: torch.dtype = torch.uint8, **_: object) -> torch.Tensor:
        size = count * dtype.itemsize
        kind = "small" if size <= MIB else "large"
        free = [
            (block["size"], index, segment)
            for segment in self.segments
            for index, block in enumerate(segment["blocks"])
            if segment["segment_type"] == kind and block["state"] == "inactive" and block["size"] >= size
        ]
        if not free:
            self.reserve(kind)
            return self.empty(count, dtype)
        had, index, segment = min(free, key=lambda entry: entry[0])
        pieces = [{"size": size, "state": "active_allocated"}, {"size": had - size, "state": "inactive"}]
        segment["blocks"][index : index + 1] = [piece for piece in pieces if piece["size"]]
        return torch.zeros(count, dtype=dtype)

    def free_bytes(self, kind: str) -> int:
        segments = [segment for segment in self.segments if segment["segment_type"] == kind]
        return sum(b["size"] for segment in segments for b in segment["blocks"] if b["state"] == "inactive")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> CachingAllocator:
    made = CachingAllocator()
    monkeypatch.setattr(torch, "empty", made.empty)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [*made.segments, *made.private])
    return made


def test_all_free_memory_is_taken_and_none_is_reserved_for_that(allocator: CachingAllocator) -> None:
    for size in (300 * KIB, 900 * KIB, 4 * MIB, 3 * MIB + 512):
        allocator.empty(size)
    allocator.reserve("small")
    allocator.reserve("large")
    allocator.private.append({**allocator.reserve("small"), "segment_pool_id": (0, 7)})
    allocator.segments.pop()
    before = len(allocator.segments)
    canaries = churn()
    assert len(allocator.segments) == before
    assert allocator.free_bytes("small") == allocator.free_bytes("large") == 0
    assert all((block == 0xFF).all() for block in canaries.blocks)
    assert allocator.private[0]["blocks"] == [{"size": 2 * MIB, "state": "inactive"}], "a graph's own memory"


def damage(canaries: Canaries) -> tuple[str, ...]:
    ((extremes, size),) = canaries.extremes()
    assert extremes.numel() == size
    return canaries.damaged(extremes.numpy())


def test_a_write_into_freed_memory_is_reported_once_with_its_size(allocator: CachingAllocator) -> None:
    allocator.reserve("small")
    allocator.reserve("large")
    canaries = churn()
    assert damage(canaries) == ()
    canaries.blocks[0][7:10] = 1
    canaries.blocks[1][-1] = 0
    expected = [f"{count} of {MIB} bytes of a freed block overwritten" for count in (3, 1)]
    assert list(damage(canaries)) == expected
    assert damage(canaries) == ()


def test_watching_freed_memory_takes_room_once(allocator: CachingAllocator) -> None:
    for _ in range(4):
        allocator.reserve("small")
    canaries = churn()
    assert damage(canaries) == ()
    free = allocator.free_bytes("large")
    assert damage(canaries) == ()
    assert allocator.free_bytes("large") == free


@pytest.mark.parametrize(("idle", "given_back"), [(900 * MIB, False), (1100 * MIB, True)])
def test_memory_that_nobody_uses_is_given_back_before_it_is_much(
    idle: int, given_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5000 * MIB + idle)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5000 * MIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append(True))
    give_back_idle_memory()
    assert bool(called) is given_back


FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 2.12 MiB is "
    "free. Process 31517 has 8.42 GiB memory in use. Process 31514 has 8.07 GiB memory in use. Of the allocated"
)


@pytest.mark.parametrize("phase", ["capture", "plan for replay", "forward"])
def test_a_full_device_is_reported_as_that_and_not_as_a_mistake_in_a_capture(phase: str) -> None:
    finding = from_exception(FULL, phase, "bucket 2", needs_cpu_lengths=False)
    assert finding.check == "completes"
    assert ": CUDA out of memory. Tried to allocate 2.00 MiB. " in finding.headline
    assert finding.headline.endswith(" of which 2.12 MiB is free.")
    assert "fewer --jobs" in finding.hint
    assert ".item()" not in finding.hint


def test_a_device_that_is_full_when_the_kit_needs_memory_is_no_bug_of_the_kit() -> None:
    answer = given_up(FULL)
    assert isinstance(answer, RunRecord)
    assert answer.lost.startswith("CUDA out of memory. Tried to allocate 2.00 MiB.")
    assert "fewer --jobs" in answer.lost
    reported = given_up(ValueError("x"))
    assert isinstance(reported, str)
    assert reported == reported.rstrip()
    assert reported.startswith("ValueError: x")


def shares_a_device(monkeypatch: pytest.MonkeyPatch, own: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (46 * MIB, 80 * 1024 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: own)


@pytest.mark.parametrize(("own", "by_others"), [(40 * 1024 - 2, True), (40 * 1024 - 1, False)])
def test_a_device_that_others_fill_says_nothing_about_the_backend(
    own: int, by_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares_a_device(monkeypatch, own * MIB)
    assert bool(filled_by_others(FULL)) is by_others
    answer = given_up(FULL)
    assert isinstance(answer, RunRecord)
    assert bool(answer.not_here) is by_others
    assert bool(answer.lost) is not by_others
    assert not filled_by_others(RuntimeError(str(FULL)))
    # The driver had no room for a stream, and torch's allocator was not asked.
    of_driver = torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
    assert bool(filled_by_others(of_driver)) is (own <= 40 * 1024)
    assert not filled_by_others(torch.AcceleratorError("CUDA error: invalid argument\nout of memory"))
    if by_others:
        assert "80.0 GiB of 80.0 GiB are used, 40.0 GiB of them by this process" in answer.not_here
