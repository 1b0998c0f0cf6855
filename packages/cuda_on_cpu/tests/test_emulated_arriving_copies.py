"""Pinned memory that an asynchronous copy from the device writes: what the host finds there before it has waited."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from cuda_on_cpu import EmulationError, emulated_cuda


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "device": lambda device: torch.cuda.synchronize(),
    "stream": lambda device: torch.cuda.current_stream().synchronize(),
    "stream.query": lambda device: torch.cuda.current_stream().query(),
    "event": lambda device: _event().synchronize(),
    "event.query": lambda device: _event().query(),
    "item": lambda device: device[0].item(),
    "cpu": lambda device: device.cpu(),
    "tolist": lambda device: device.tolist(),
}
READS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": lambda host: host.tolist(),
    "item": lambda host: host[2].item(),
    "int": lambda host: int(host[2]),
    "max": lambda host: host.max(),
    "sum of a part": lambda host: host[1:3].sum(),
    "every second": lambda host: host[::2].clone(),
    "print": repr,
    "iteration": lambda host: [int(each) for each in host],
    "write": lambda host: host.zero_(),
    "fill": lambda host: host.__setitem__(slice(1, 2), 7),
}
READS_OF_NUMPY: dict[str, Callable[[np.ndarray], object]] = {
    "element": lambda seen: seen[2],
    "last": lambda seen: seen[-1],
    "int": lambda seen: int(seen[1]),
    "tolist": lambda seen: seen.tolist(),
    "item": lambda seen: seen.item(2),
    "sum": lambda seen: seen.sum(),
    "max": np.max,
    "sum of a part": lambda seen: seen[1:3].sum(),
    "backwards": lambda seen: seen[::-1].copy(),
    "chosen": lambda seen: seen[[0, 2]],
    "masked": lambda seen: seen[np.array([True, False, True, False])],
    "comparison": lambda seen: seen > 0,
    "iteration": lambda seen: [int(each) for each in seen],
    "cumsum": np.cumsum,
    "concatenate": lambda seen: np.concatenate([seen, seen]),
    "stack": lambda seen: np.stack([seen]),
    "copyto": lambda seen: np.copyto(np.zeros(4, np.int32), seen),
    "where": lambda seen: np.where(seen > 0, seen, 0),
    "array_equal": lambda seen: np.array_equal(seen, np.zeros(4)),
    "nonzero": np.nonzero,
    "argmax": np.argmax,
    "print": str,
    "pickle": pickle.dumps,
    "list": list,
    "dot": lambda seen: np.dot(seen, seen),
    "tensor": lambda seen: torch.tensor(seen).tolist(),
    "in": lambda seen: 3 in seen,
    "write": lambda seen: seen.__setitem__(0, 7),
    "write all": lambda seen: seen.__setitem__(..., 7),
    "in place": lambda seen: np.add(seen, 1, out=seen),
    "fill": lambda seen: seen.fill(0),
}
COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy_": lambda device: pinned().copy_(device, non_blocking=True),
    "copy_ of other numbers": lambda device: pinned().copy_(device.long(), non_blocking=True),
    "to": lambda device: device.to("cpu", non_blocking=True),
}


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with emulated_cuda():
        yield


def pinned() -> torch.Tensor:
    return torch.full((4,), -1, dtype=torch.int32, pin_memory=True)


def numbers() -> torch.Tensor:
    return torch.arange(1, 5, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("read", READS)
def test_the_host_must_not_touch_what_it_has_not_waited_for(copy: str, read: str) -> None:
    host = COPIES[copy](numbers())
    with pytest.raises(EmulationError, match=r"on the host that .* copies to, asynchronously") as caught:
        READS[read](host)
    assert caught.value.site.filename.endswith("test_emulated_arriving_copies.py")


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("wait", WAITS)
def test_whoever_waits_finds_the_numbers(copy: str, wait: str) -> None:
    device = numbers()
    host = COPIES[copy](device)
    WAITS[wait](device)
    assert host.tolist() == [1, 2, 3, 4]
    assert host.numpy().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("read", READS_OF_NUMPY)
def test_nor_may_it_through_numpy(read: str) -> None:
    host = pinned()
    seen = host.numpy()
    host.copy_(numbers(), non_blocking=True)
    with pytest.raises(EmulationError, match=r"on the host that .* copies to, asynchronously") as caught:
        READS_OF_NUMPY[read](seen)
    assert caught.value.site.filename.endswith("test_emulated_arriving_copies.py")


@pytest.mark.parametrize("read", READS_OF_NUMPY)
@pytest.mark.parametrize("when", ["before", "after"])
def test_numpy_finds_the_numbers_of_a_copy_that_was_waited_for(when: str, read: str) -> None:
    host = pinned()
    seen = host.numpy()
    host.copy_(numbers(), non_blocking=True)
    if when == "after":
        seen = host.numpy()  # no element is read
    _event().synchronize()
    found, expected = READS_OF_NUMPY[read](seen), READS_OF_NUMPY[read](np.arange(1, 5, dtype=np.int32))
    assert isinstance(found, type(expected))
    np.testing.assert_equal(found, expected)


def test_numpy_may_use_what_no_copy_goes_to() -> None:
    host = torch.zeros(8, dtype=torch.int32, pin_memory=True)
    seen = host.numpy()
    host[:4].copy_(numbers(), non_blocking=True)
    seen[4:] = 9
    seen[5] += 1
    assert seen[4:].tolist() == [9, 10, 9, 9]
    assert seen[::2].shape == (4,)
    assert seen.reshape(2, 4)[1].max() == 10
    with pytest.raises(EmulationError, match="has not waited for that copy"):
        seen.reshape(2, 4)[0].max()


def test_an_array_of_pinned_memory_is_an_ordinary_array_to_everyone_else() -> None:
    seen = pinned().numpy()
    assert isinstance(seen, np.ndarray)
    assert type(seen + 1) is type(np.asarray(seen)) is type(pickle.loads(pickle.dumps(seen))) is np.ndarray
    torch.from_numpy(seen)[0] = 5
    assert seen[0] == 5
    seen += 1
    assert seen.tolist() == [6, 0, 0, 0]


def test_who_looks_past_numpy_finds_what_was_there_before() -> None:
    host = pinned()
    seen = np.asarray(host.numpy())
    host.copy_(numbers(), non_blocking=True)
    assert seen.tolist() == [-1] * 4
    torch.cuda.synchronize()
    assert seen.tolist() == [1, 2, 3, 4]


def test_an_event_from_before_the_copy_says_nothing_of_it() -> None:
    event = _event()
    host = pinned().copy_(numbers(), non_blocking=True)
    event.synchronize()
    with pytest.raises(EmulationError, match="has not waited for that copy"):
        host.tolist()


def test_nor_does_another_stream_until_it_waits_for_that_of_the_copy() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    host = pinned().copy_(numbers(), non_blocking=True)
    side.synchronize()
    with pytest.raises(EmulationError, match="has not waited for that copy"):
        host.tolist()
    host = pinned().copy_(numbers(), non_blocking=True)
    side.wait_stream(main)
    side.synchronize()
    assert host.tolist() == [1, 2, 3, 4]


def test_the_rest_of_the_buffer_may_be_used() -> None:
    host = torch.zeros(8, dtype=torch.int32, pin_memory=True)
    host[:4].copy_(numbers(), non_blocking=True)
    host[4:].fill_(9)
    assert host[4:].tolist() == [9] * 4
    with pytest.raises(EmulationError, match="has not waited for that copy"):
        host[3:].tolist()


def test_looking_at_its_shape_is_no_use_of_it() -> None:
    host = pinned().copy_(numbers(), non_blocking=True)
    assert host[:2].shape == (2,)
    assert host.view(2, 2).is_pinned()
    assert host.data_ptr()


def test_the_device_finds_the_numbers_behind_its_own_copy() -> None:
    host = pinned().copy_(numbers(), non_blocking=True)
    assert host.to("cuda", non_blocking=True).tolist() == [1, 2, 3, 4]
    host.copy_(numbers() + 1, non_blocking=True)
    target = torch.empty(4, dtype=torch.int32, device="cuda")
    target.copy_(host, non_blocking=True)
    assert target.tolist() == [2, 3, 4, 5]


def test_a_graph_that_reads_it_finds_them_too() -> None:
    host, target = pinned(), torch.zeros(4, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(host, non_blocking=True)
    host.copy_(numbers(), non_blocking=True)
    graph.replay()
    assert target.tolist() == [1, 2, 3, 4]


def test_the_later_of_two_copies_holds() -> None:
    host = pinned()
    host.copy_(numbers(), non_blocking=True)
    host[1:].copy_(numbers()[:3] * 10, non_blocking=True)
    torch.cuda.synchronize()
    assert host.tolist() == [1, 10, 20, 30]


@pytest.mark.parametrize("blocks", ["a copy that waits", "memory that is not pinned", "a target with gaps"])
def test_a_copy_that_the_host_waits_for_is_over(blocks: str) -> None:
    if blocks == "a copy that waits":
        host = pinned().copy_(numbers())
    elif blocks == "memory that is not pinned":
        pinned()
        host = torch.zeros(4, dtype=torch.int32).copy_(numbers(), non_blocking=True)
    else:
        host = torch.zeros(8, dtype=torch.int32, pin_memory=True)[::2].copy_(numbers(), non_blocking=True)
    assert host.tolist() == [1, 2, 3, 4]


def test_memory_that_is_gone_is_not_written() -> None:
    pinned().copy_(numbers(), non_blocking=True)
    gc.collect()
    others = [pinned() for _ in range(8)]
    torch.cuda.synchronize()
    assert all(each.tolist() == [-1] * 4 for each in others)


def test_large_copies_arrive_rather_than_fill_the_memory() -> None:
    size = (1 << 24) // 4
    many = torch.ones(size, dtype=torch.int32, device="cuda")
    first, second = (torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2))
    first.copy_(many, non_blocking=True)
    second.copy_(many, non_blocking=True)
    assert first.sum() == size
    with pytest.raises(EmulationError, match="has not waited for that copy"):
        second.sum()


def test_another_thread_may_have_waited() -> None:
    host = pinned().copy_(numbers(), non_blocking=True)

    def wait() -> None:
        with emulated_cuda():
            torch.cuda.synchronize()

    other = threading.Thread(target=wait)
    other.start()
    other.join()
    assert host.tolist() == [1, 2, 3, 4]


def test_an_inner_block_of_the_emulation_is_no_wait() -> None:
    host = pinned().copy_(numbers(), non_blocking=True)
    with emulated_cuda():
        pass
    with pytest.raises(EmulationError, match="has not waited for that copy"):
        host.tolist()


def test_what_was_on_its_way_when_the_emulation_ended_is_there() -> None:
    found: list[list[int]] = []

    def program() -> None:
        with emulated_cuda():
            host = pinned().copy_(numbers(), non_blocking=True)
        found.append(host.tolist())

    other = threading.Thread(target=program)
    other.start()
    other.join()
    assert found == [[1, 2, 3, 4]]
