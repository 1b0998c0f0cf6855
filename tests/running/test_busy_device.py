"""A stream is kept busy for exactly as long as the host takes to plan the next step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_testkit.environment import keep_device_busy
from attn_testkit.graphs import busy
from cuda_on_cpu import emulated_cuda


class Driver:
    """Stands in for CUDA's driver: keeps the address of the number for which a kernel waits."""

    def __init__(self) -> None:
        self.loaded = 0
        self.launches: list[tuple[int, int]] = []

    def cuModuleLoadData(self, image: bytes) -> tuple[int, str]:
        assert image.endswith(b"\0")
        self.loaded += 1
        return 0, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[int, str]:
        return 0, "kernel"

    def cuLaunchKernel(self, kernel: str, *launch: Any) -> tuple[int]:
        stream, (values, _), _ = launch[-3:]
        self.launches.append((values[0], stream))
        return (0,)

    @property
    def waits(self) -> list[bool]:
        """For each launch, whether its kernel would still wait."""
        return [ctypes.c_int32.from_address(address).value == 0 for address, _ in self.launches]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(busy, "driver_api", lambda: made)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 7}))
    for cached in (busy._done, busy._kernel):
        cached.cache_clear()
    yield made
    for cached in (busy._done, busy._kernel):
        cached.cache_clear()


def test_a_stream_waits_until_the_host_is_done_each_time_anew(driver: Driver) -> None:
    for _ in range(2):
        done = keep_device_busy(True)
        assert driver.waits[-1]
        done()
        assert not driver.waits[-1]
    assert [stream for _, stream in driver.launches] == [7, 7]
    assert driver.loaded == 1


def test_nothing_waits_if_nothing_is_planned_ahead_or_cuda_is_emulated(driver: Driver) -> None:
    keep_device_busy(False)()
    with emulated_cuda():
        keep_device_busy(True)()
    assert driver.launches == []


def test_without_bindings_of_the_driver_a_stream_waits_a_fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(busy, "driver_api", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append)
    keep_device_busy(True)()
    assert waits == [busy._CYCLES]
