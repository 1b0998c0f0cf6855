"""Launches compiled for a device that is not there, compared with what one H100 did with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
programs = pytest.importorskip("target_programs")

HERE = Path(__file__).parent
H100 = {each["name"]: each for each in json.loads((HERE / "targets_h100.json").read_text())["launches"]}


def test_the_labels_are_those_of_the_device():
    assert {each.name: each.refused for each in programs.LAUNCHES} == {
        name: bool(answer["refused"]) for name, answer in H100.items()
    }


def test_what_the_device_refused_is_refused_without_it_and_the_rest_needs_as_much_shared_memory():
    """One launch for each limit and one that runs: `compile_targets.py` has all, and takes the compiler longer."""
    names = ["product of six stages", "two dtypes", "64 warps", "transposed"]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "compile_targets.py"), "sm90", *names],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [each["name"] for each in answers] == [each.name for each in programs.LAUNCHES if each.name in names]
    for answer in answers:
        device = H100[answer["name"]]
        assert not answer["unknown"]
        assert bool(answer["refused"]) == bool(device["refused"]), answer
        if not answer["refused"]:
            assert answer["shared"] == device["shared"], answer
