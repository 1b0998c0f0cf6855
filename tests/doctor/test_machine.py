"""What is read of a machine, and what is said of it: ranges include their ends, limits are the smaller ones."""

from __future__ import annotations

import importlib.metadata as metadata
from dataclasses import replace
from pathlib import Path

import pytest

from attn_testkit.running.processes.machine import GIGABYTE, Resources, packages, resources, slow_because

HERE = Resources(4, None, 100 * GIGABYTE, limited=False, threads="", caches={"/triton": 3, "/flashinfer": 1})


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    installed: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    return installed


@pytest.mark.parametrize(
    ("installed", "fits"), [("3.5.9", False), ("3.6", True), ("3.10.9", True), ("3.11", False), ("3.11.0.dev1", False)]
)
def test_a_version_is_held_against_the_range_of_the_extra(versions, installed, fits):
    versions["triton"] = installed
    (found,) = packages(["triton<3.11,>=3.6; extra == 'triton'"])
    assert (found.name, found.wanted, found.installed, found.extra) == ("triton", ">=3.6,<3.11", installed, "triton")
    assert found.fits is fits
    assert found.command == ("" if fits else "pip install 'triton>=3.6,<3.11'")


def test_what_is_not_installed_has_a_command_and_what_developers_need_is_left_out(versions):
    listed = ["torch<2.15,>=2.11", "x>=1; extra == 'fuzz'", "ruff==1; extra == 'dev'", "x>=1; extra == 'dev'"]
    found = packages(listed)
    assert [(p.name, p.extra, p.installed, p.fits) for p in found] == [
        ("torch", "", "", False),
        ("x", "fuzz", "", False),
    ]
    assert [p.command for p in found] == ["pip install 'torch>=2.11,<2.15'", "pip install 'x>=1'"]


def test_the_kit_says_what_it_needs_itself():
    assert {"torch", "numpy", "triton"} <= {package.name for package in packages()}


def machine(root: Path, **files: str) -> Resources:
    names = {"cpu": "sys/fs/cgroup/cpu.max", "memory": "sys/fs/cgroup/memory.max", "meminfo": "proc/meminfo"}
    for name, text in files.items():
        path = root / names[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return resources({"HOME": str(root), "OMP_NUM_THREADS": "8"}, root)


def test_limits_of_a_container_count_where_they_are_smaller_than_the_machine(tmp_path):
    found = machine(tmp_path, cpu="150000 100000\n", memory="4000000000\n", meminfo="MemTotal:  8000000 kB\n")
    assert (found.quota, found.memory, found.limited, found.threads) == (1.5, 4_000_000_000, True, "8")
    assert found.usable == 1


@pytest.mark.parametrize("memory", ["max\n", "9000000000000\n"])
def test_without_a_limit_the_machine_counts(tmp_path, memory):
    found = machine(tmp_path, cpu="max 100000\n", memory=memory, meminfo="MemTotal:  8000000 kB\n")
    assert (found.quota, found.memory, found.limited) == (None, 8_192_000_000, False)


def test_nothing_to_read_is_nothing_known(tmp_path):
    found = machine(tmp_path)
    assert (found.quota, found.memory, found.limited) == (None, None, False)
    assert found.jobs == found.cores


def test_caches_are_counted_where_they_are_said_to_be(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kernel.so").write_text("")
    found = resources({"HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "mine")}, tmp_path)
    assert found.caches == {str(tmp_path / "mine"): 1, str(tmp_path / ".cache" / "flashinfer"): None}


@pytest.mark.parametrize(("memory", "jobs"), [(3.5, 1), (3.6, 2), (4.3, 2), (4.4, 3), (1.0, 1), (100, 4)])
def test_jobs_are_as_many_as_memory_and_cores_have_room_for(memory, jobs):
    assert replace(HERE, memory=round(memory * GIGABYTE)).jobs == jobs


@pytest.mark.parametrize(
    ("changes", "emulated", "words"),
    [
        ({}, True, "CUDA is emulated"),
        ({}, False, "(--jobs 4)"),
        ({"quota": 2.0}, False, "this container may use 2 of 4 cores"),
        ({"memory": 3 * GIGABYTE, "limited": True}, False, "this container may use 3.0 GB of memory: room for 1 of 4"),
        ({"threads": "16"}, False, "OMP_NUM_THREADS is 16"),
        ({"caches": {"/triton": 3, "/flashinfer": None}}, False, "no compiled kernel is stored yet in /flashinfer;"),
        ({"caches": {"/triton": 0, "/flashinfer": 1}}, False, "no compiled kernel is stored yet in /triton;"),
    ],
)
def test_what_is_slow_is_said(changes, emulated, words):
    assert any(words in text for text in slow_because(replace(HERE, **changes), emulated=emulated))


@pytest.mark.parametrize(
    ("changes", "emulated", "words"),
    [
        ({}, False, "emulated"),
        ({"cores": 1}, False, "--jobs"),
        ({"quota": 4.0}, False, "container"),
        ({"threads": "1"}, False, "OMP_NUM_THREADS"),
        ({}, False, "compiled on first use"),
        ({"caches": {"/triton": None}}, True, "compiled on first use"),
        ({"memory": None}, False, "GB of memory"),
    ],
)
def test_what_is_not_slow_is_not_said(changes, emulated, words):
    assert not any(words in text for text in slow_because(replace(HERE, **changes), emulated=emulated))
