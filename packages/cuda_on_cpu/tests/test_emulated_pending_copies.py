"""Pinned memory that is written again while a copy from it may be pending, and the ways of the host to wait."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from cuda_on_cpu import EmulationError, emulated_cuda

WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "device": lambda copied: torch.cuda.synchronize(),
    "stream": lambda copied: torch.cuda.current_stream().synchronize(),
    "query": lambda copied: torch.cuda.current_stream().query(),
    "event": lambda copied: _event().synchronize(),
    "item": lambda copied: copied[0].item(),
    "cpu": lambda copied: copied.cpu(),
    "tolist": lambda copied: copied.tolist(),
    "bool": lambda copied: bool(copied.sum() > 3),
    "nonzero": lambda copied: copied.nonzero(),
}


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with emulated_cuda():
        yield


def pinned() -> torch.Tensor:
    return torch.zeros(8, dtype=torch.int32, pin_memory=True)


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": pinned,
    "pin_memory": lambda: torch.zeros(8, dtype=torch.int32).pin_memory(),
    "tensor": lambda: torch.tensor([0] * 8, dtype=torch.int32, pin_memory=True),
    "empty_like": lambda: torch.empty_like(torch.zeros(8, dtype=torch.int32), pin_memory=True).zero_(),
}
COPIED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda host: host.to("cuda", non_blocking=True),
    "cuda": lambda host: host.cuda(non_blocking=True),
    "copy_": lambda host: torch.empty(8, dtype=torch.int32, device="cuda").copy_(host, non_blocking=True),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("copied", COPIED)
def test_a_second_copy_of_what_was_written_again_is_refused(made: str, copied: str) -> None:
    host = MADE[made]()
    COPIED[copied](host)
    host[7] = 1
    with pytest.raises(EmulationError, match="its pinned source was written again") as caught:
        COPIED[copied](host)
    assert caught.value.site.filename.endswith("test_emulated_pending_copies.py")


@pytest.mark.parametrize("way", WAYS)
def test_so_is_the_next_wait_behind_it_and_only_one(way: str) -> None:
    host = pinned()
    copied = COPIED["to"](host)
    host.numpy()[0] = 1
    with pytest.raises(EmulationError, match="its pinned source was written again"):
        WAYS[way](copied)
    WAYS[way](copied)


@pytest.mark.parametrize("way", WAYS)
def test_whoever_waits_first_may_write_again(way: str) -> None:
    host = pinned()
    for number in range(3):
        host.fill_(number)
        copied = COPIED["to"](host)
        WAYS[way](copied)
    assert copied.tolist() == [2] * 8


def test_the_same_numbers_again_and_another_part_of_the_memory_are_nothing() -> None:
    host = pinned()
    COPIED["to"](host)
    host.zero_()
    host[:4].to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    host[:4].to("cuda", non_blocking=True)
    host[4:] = 1
    torch.cuda.synchronize()


def test_what_torch_copies_on_the_host_first_may_be_written_again() -> None:
    host = pinned()
    for source, kind in (
        (host, torch.float32),
        (host[::2], torch.int32),
        (torch.zeros(8, dtype=torch.int32), torch.int32),
    ):
        source.to("cuda", kind, non_blocking=True)
        source.fill_(5)
        torch.cuda.synchronize()


def test_a_copy_that_waits_is_over() -> None:
    host = pinned()
    host.to("cuda")
    host.fill_(1)
    torch.cuda.synchronize()


def _assign(copied: torch.Tensor) -> None:
    copied[2:] = 0


NO_WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "assigned": _assign,
    "fill_": lambda copied: copied.fill_(torch.tensor(3)),
    "product": lambda copied: copied * torch.tensor(3),
    "masked_fill": lambda copied: copied.masked_fill(copied > 1, torch.tensor(0)),
}


@pytest.mark.parametrize("way", NO_WAITS)
def test_a_number_of_the_host_is_an_argument_of_the_launch_and_nobody_waits_for_it(way: str) -> None:
    host = pinned()
    copied = COPIED["to"](host)
    NO_WAITS[way](copied)
    host[7] = 1
    with pytest.raises(EmulationError, match="its pinned source was written again"):
        torch.cuda.synchronize()


def test_memory_that_is_gone_is_not_looked_at() -> None:
    host = pinned()
    COPIED["to"](host)
    del host
    gc.collect()
    others = [pinned().fill_(number) for number in range(1, 9)]
    torch.cuda.synchronize()
    assert len(others) == 8


def test_another_thread_may_have_waited() -> None:
    host = pinned()
    COPIED["to"](host)

    def wait() -> None:
        with emulated_cuda():
            torch.cuda.synchronize()

    other = threading.Thread(target=wait)
    other.start()
    other.join()
    host.fill_(1)
    torch.cuda.synchronize()


def test_a_copy_of_the_device_may_fill_what_its_earlier_copy_has_read() -> None:
    host = pinned()
    page = host.to("cuda", non_blocking=True)
    page.add_(1)
    host.copy_(page, non_blocking=True)
    again = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(again.cpu(), host)


def test_what_the_host_wrote_before_the_copy_of_the_device_is_still_reported() -> None:
    host = pinned()
    page = host.to("cuda", non_blocking=True)
    host.fill_(7)
    host.copy_(page + 1, non_blocking=True)
    with pytest.raises(EmulationError, match="pinned source was written again"):
        torch.cuda.synchronize()
