"""A device is kept busy for as long as the host takes: where it was too short, the next wait is longer."""

from __future__ import annotations

import pytest
import torch

from attn_testkit import environment
from attn_testkit.environment import keep_device_busy
from cuda_on_cpu import emulated_cuda


class Device:
    """Stands in for a stream: how long it was told to wait, and whether that was over when the host asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cycles: int) -> None:
        self.waits: list[int] = []
        self.over = False
        device = self

        class Event:
            def record(self) -> None:
                pass

            def query(self) -> bool:
                return device.over

        monkeypatch.setattr(torch.cuda, "_sleep", self.waits.append)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(environment, "_cycles", cycles)

    def waits_next(self, over: bool) -> int:
        self.over = over
        done = keep_device_busy(True)
        done()
        return self.waits[-1]


def test_the_next_wait_is_twice_as_long_only_where_one_was_over_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, cycles=1000)
    assert [device.waits_next(over) for over in (False, True, False, True, True)] == [1000, 1000, 2000, 2000, 4000]


def test_no_wait_is_longer_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    most = environment._MOST_CYCLES
    device = Device(monkeypatch, cycles=most // 2 + 1)
    assert [device.waits_next(True) for _ in range(3)] == [most // 2 + 1, most, most]


def test_nothing_waits_where_nothing_is_planned_ahead_or_cuda_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, cycles=1000)
    keep_device_busy(False)()
    with emulated_cuda():
        keep_device_busy(True)()
    assert device.waits == []
