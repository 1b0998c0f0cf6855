"""GPUs of the caller: only those, in the caller's own spelling, evenly."""

from __future__ import annotations

import pytest

from attn_testkit.running.processes.gpus import GpuSlots, visible_gpus


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("0,1", ("0", "1")),
        ("6, 3", ("6", "3")),
        ("GPU-ab,MIG-cd", ("GPU-ab", "MIG-cd")),
        ("", ()),
        ("-1", ()),
        ("2,-1,3", ("2",)),
    ],
)
def test_the_callers_list_is_indexed_not_replaced(listed, expected):
    """A bare ordinal would reach a GPU that the caller excluded."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == expected


def test_without_a_list_every_device_file_is_a_gpu(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, str(tmp_path / "nvidia[0-9]*")) == ("0", "1")


def test_a_replacement_takes_the_gpu_that_its_predecessor_left():
    """A replaced worker has a new number: gw4 of four would sit beside gw0 while a GPU idles."""
    slots = GpuSlots(("3", "5"))
    assert [slots.take(w) for w in ("gw0", "gw1", "gw2")] == ["3", "5", "3"]
    slots.free("gw1")
    slots.free("gw9")
    assert slots.take("gw3") == "5"
    slots.free("gw0")
    slots.free("gw2")
    assert [slots.take(w) for w in ("gw4", "gw5")] == ["3", "3"], "5 is still gw3's"
    assert GpuSlots(()).take("gw0") == ""
