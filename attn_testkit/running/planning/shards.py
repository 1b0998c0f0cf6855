"""Shards of a plan: the same on every machine that makes the plan."""

from __future__ import annotations

import hashlib
import heapq
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ...registry import UsageError
from ...reports.history import Key
from ...reports.history import key_of as key_without_seed
from ...reports.record import Report
from ...reports.shards import Shard, digest_of, shard_selection
from ...results.case_result import RAN, CaseResult, Status
from .request import Item, Plan

_Case = tuple[str, str]
"""Backend and case: eager and graph of a case share data and expected values, so they are in one shard."""
Durations = Mapping[Key, float]
"""Case-run, without the seed of its run -> seconds."""


def durations_of(reports: Iterable[Report]) -> dict[Key, float]:
    """Seconds of every case-run that ran, from results files. Raises ``UsageError`` if none did."""
    found = {
        key_without_seed(result, report.header.seed): sum(result.seconds.values())
        for report in reports
        for result in report.results
        if result.case and result.status in RAN
    }
    if not found:
        raise UsageError("--durations-from names no results file with a case-run that ran")
    return found


def shards_of(items: Sequence[Item], count: int, seed: int, durations: Durations | None = None) -> list[list[Item]]:
    """Cut case-runs into ``count`` shards, each in the order of ``items``; a shard may be empty.

    Without durations the hash of a case's id selects its shard, so a new case moves no other. With durations the
    longest case is assigned first, always to the shard with the least work; a case without a duration counts as the
    median.
    """
    place = _by_hash(items, count) if durations is None else _balanced(items, count, seed, durations)
    shards: list[list[Item]] = [[] for _ in range(count)]
    for item in items:
        shards[place[item.backend, item.case]].append(item)
    return shards


def _by_hash(items: Iterable[Item], count: int) -> dict[_Case, int]:
    return {(item.backend, item.case): _hashed(item.backend, item.case) % count for item in items}


def _hashed(backend: str, case: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{backend}\0{case}".encode(), digest_size=8).digest())


def _balanced(items: Iterable[Item], count: int, seed: int, durations: Durations) -> dict[_Case, int]:
    usual = statistics.median(durations.values())
    seconds: dict[_Case, float] = {}
    for item in items:
        name = item.backend, item.case
        row = CaseResult(item.backend, item.mode, item.execution, item.case, Status.PASSED)
        seconds[name] = seconds.get(name, 0.0) + durations.get(key_without_seed(row, seed), usual)
    loads = [(0.0, index) for index in range(count)]
    place: dict[_Case, int] = {}
    for name in sorted(seconds, key=lambda each: (-seconds[each], each)):
        load, index = heapq.heappop(loads)
        place[name] = index
        heapq.heappush(loads, (load + seconds[name], index))
    return place


def shard_of(plan: Plan, shard: Shard, durations: Durations | None = None) -> Plan:
    """Return the plan of one shard. Rows that are known without running and count as planned belong to one shard too;
    those about a whole mode are in every shard.
    """
    header = plan.header
    own = shards_of(plan.items, shard.count, header.seed, durations)[shard.number - 1]
    chosen = set(own)
    preset = tuple(
        row for row in plan.preset if not row.case or _hashed(row.backend, row.case) % shard.count == shard.number - 1
    )
    failed = sum(row.status is Status.FAILED for row in preset)
    return replace(
        plan,
        header=replace(
            header,
            selection=shard_selection(header, shard),
            plan=digest_of(item.key for item in plan.items),
            planned=len(own) + failed,
            planned_in_all=header.planned,
        ),
        items=tuple(own),
        preset=preset,
        elsewhere=tuple(item for item in plan.items if item not in chosen),
    )
