"""Ranks that communicate, as threads on torch's own process group: their turns, and a rank that does not come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attn_testkit.runner_modes.collectives import RanksAsThreads
from attn_testkit.runner_modes.errors import MissingRankError

from cuda_on_cpu import emulated_cuda


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    """The device of the caller, which ranks use as well."""
    with emulated_cuda():
        yield


def calls(ranks: int, call: Callable[[int], Any]) -> list[Callable[[], Any]]:
    return [lambda rank=rank: call(rank) for rank in range(ranks)]  # type: ignore[misc]


def gathered(rank: int, device: str = "cpu") -> list[int]:
    own = torch.full((2,), rank, device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_every_rank_gets_the_parts_of_all_whatever_the_order(order: list[int]) -> None:
    run = RanksAsThreads(3)
    assert run(calls(3, lambda rank: (dist.get_rank(), gathered(rank))), order) == [
        (rank, [0, 0, 1, 1, 2, 2]) for rank in range(3)
    ]


def test_ranks_keep_their_groups_from_call_to_call() -> None:
    run, groups = RanksAsThreads(3), dict[int, Any]()

    def make(rank: int) -> None:
        groups[rank] = dist.new_group([0, 2])

    def use(rank: int) -> float:
        own = torch.tensor([float(rank + 1)])
        if rank != 1:
            dist.all_reduce(own, group=groups[rank])
        return float(own)

    run(calls(3, make), range(3))
    assert run(calls(3, use), range(3)) == [4.0, 2.0, 4.0]


def test_ranks_use_an_emulated_device_as_their_caller_does() -> None:
    assert RanksAsThreads(2)(calls(2, lambda rank: gathered(rank, "cuda")), range(2)) == [[0, 0, 1, 1]] * 2


def test_one_rank_runs_at_a_time() -> None:
    running, most = list[int](), list[int]()

    def call(rank: int) -> None:
        for _ in range(3):
            running.append(rank)
            most.append(len(running))
            running.remove(rank)
            gathered(rank)

    RanksAsThreads(3)(calls(3, call), range(3))
    assert max(most) == 1


def test_a_rank_that_does_not_come_is_named_with_the_lines_of_those_that_wait() -> None:
    def call(rank: int) -> list[int]:
        return [] if rank == 1 else gathered(rank)

    with pytest.raises(MissingRankError, match="rank 1 returned, rank 0 waits in all_gather") as caught:
        RanksAsThreads(3)(calls(3, call), range(3))
    assert "every rank of a group has to call the same collectives" in caught.value.cure
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_rank_in_another_collective_is_named() -> None:
    def call(rank: int) -> None:
        if rank == 0:
            gathered(rank)
        else:
            dist.all_reduce(torch.ones(2))

    with pytest.raises(
        MissingRankError, match=r"rank 1 calls all_reduce.*another rank of the group waits in AllGather"
    ):
        RanksAsThreads(2)(calls(2, call), range(2))


def test_ranks_that_wait_in_different_groups_are_both_named() -> None:
    run = RanksAsThreads(2)
    groups = run(calls(2, lambda rank: [dist.new_group([0, 1]) for _ in range(2)]), range(2))

    def call(rank: int) -> None:
        dist.all_reduce(torch.ones(1), group=groups[rank][rank])

    with pytest.raises(MissingRankError, match=r"rank 0 waits in all_reduce.*rank 1 waits in all_reduce"):
        run(calls(2, call), range(2))


def test_the_error_of_a_rank_ends_the_others_and_is_raised() -> None:
    def call(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1 is wrong")
        gathered(rank)

    run = RanksAsThreads(3)
    with pytest.raises(ValueError, match="rank 1 is wrong"):
        run(calls(3, call), range(3))
    assert run(calls(3, gathered), range(3)) == [[0, 0, 1, 1, 2, 2]] * 3, "the next call is not affected"


def test_nothing_of_the_group_of_threads_is_left_in_torch() -> None:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    before = dict(vars(threaded.ProcessLocalGroup)), dict(vars(threaded.Collective)), dist.distributed_c10d._world
    RanksAsThreads(2)(calls(2, gathered), range(2))
    after = dict(vars(threaded.ProcessLocalGroup)), dict(vars(threaded.Collective)), dist.distributed_c10d._world
    assert before[1:] == after[1:]
    assert {name for name in before[0] if before[0][name] is not after[0][name]} <= {"_cur_coll_on_pgs"}
