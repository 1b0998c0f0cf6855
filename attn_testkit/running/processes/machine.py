"""Resources of a machine, which are determined without torch: packages, cores, memory, caches of compiled kernels."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from ...distributions import DISTRIBUTIONS, KIT

GIGABYTE = 10**9
MEMORY_OF_A_RUN = 2 * GIGABYTE
"""The most bytes that front end, judge and the process that workers are forked from need in core."""
MEMORY_OF_A_JOB = 0.8 * GIGABYTE
"""Bytes that each worker adds to that."""


@dataclass(frozen=True)
class Package:
    """A package that the kit or one of its extras requires."""

    name: str
    wanted: str
    """``>=3.6,<3.11``; empty for any version."""
    installed: str
    """Version; empty if the package is not installed."""
    extra: str
    """The extra that installs it; empty for what the kit itself needs."""
    fits: bool
    """True if the package is installed, and its version is in the range."""

    @property
    def command(self) -> str:
        """Command that installs the package; empty if it is installed. Not by the extra: the kit may be on no index."""
        own = next((each.command for each in DISTRIBUTIONS if each.name == self.name), "")
        return "" if self.fits else own or f"pip install '{self.name}{self.wanted}'"


def packages(requirements: list[str] | None = None) -> list[Package]:
    """Packages that pyproject.toml requires, extras for users included, and the installed versions.

    ``requirements``: as the kit's metadata list them; default: those.
    """
    listed = (metadata.requires(KIT.name) or []) if requirements is None else requirements
    found: dict[str, Package] = {}
    for text in listed:
        requirement = Requirement(text)
        match = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", str(requirement.marker or ""))
        extra = match[1] if match else ""
        if extra != _DEVELOPERS and requirement.name not in found:
            found[requirement.name] = _package(requirement, extra)
    return list(found.values())


_DEVELOPERS = "dev"


def _package(requirement: Requirement, extra: str) -> Package:
    # In the order in which one writes it: the lower end first.
    wanted = ",".join(sorted(str(requirement.specifier).split(","), key=lambda part: part.startswith("<")))
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Package(requirement.name, wanted, "", extra, fits=False)
    fits = requirement.specifier.contains(installed, prereleases=True)
    return Package(requirement.name, wanted, installed, extra, fits)


@dataclass(frozen=True)
class Resources:
    """Cores and memory that processes may use here."""

    cores: int
    """Number of cores that this process may run on."""
    quota: float | None
    """Cores that a container may use in sum; None: all."""
    memory: int | None
    """Bytes that a container, or the machine, has; None: unknown."""
    limited: bool
    """True if the memory is a container's limit."""
    threads: str
    """``OMP_NUM_THREADS``; empty if it is not set."""
    caches: Mapping[str, int | None]
    """Folder of compiled kernels -> files in it; None: the folder does not exist."""

    @property
    def usable(self) -> int:
        """Processes that can run at the same time."""
        return max(1, min(self.cores, int(self.quota) if self.quota else self.cores))

    @property
    def jobs(self) -> int:
        """Number of workers that cores and memory have room for."""
        room = self.usable
        if self.memory is not None:
            room = min(room, int((self.memory - MEMORY_OF_A_RUN) / MEMORY_OF_A_JOB))
        return max(1, room)


def resources(environment: Mapping[str, str], root: Path = Path("/")) -> Resources:
    """Look at this machine. ``root``: where /sys and /proc are."""
    limit = _number(root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory/memory.limit_in_bytes")
    match = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    total = int(match[1]) * 1024 if match else None
    limited = limit is not None and (total is None or limit < total)
    return Resources(
        cores=len(os.sched_getaffinity(0)),
        quota=_quota(root),
        memory=limit if limited else total,
        limited=limited,
        threads=environment.get("OMP_NUM_THREADS", ""),
        caches={
            str(folder): (sum(path.is_file() for path in folder.rglob("*")) if folder.is_dir() else None)
            for folder in _cache_folders(environment)
        },
    )


def _cache_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    home = Path(environment.get("HOME", "~")).expanduser()
    yield Path(environment.get("TRITON_CACHE_DIR") or Path(environment.get("TRITON_HOME") or home, ".triton", "cache"))
    yield Path(environment.get("FLASHINFER_WORKSPACE_BASE") or home, ".cache", "flashinfer")


def _number(*files: Path) -> int | None:
    for file in files:
        text = _text(file)
        if text.isdecimal():
            return int(text)
    return None


def _quota(root: Path) -> float | None:
    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        return int(quota) / int(period)
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


_Reason = Callable[[Resources, bool], str]


def slow_because(found: Resources, *, emulated: bool) -> list[str]:
    """Sentences about what makes runs slow here, and what to do about it."""
    return [text for reason in _REASONS if (text := reason(found, emulated))]


def _of_emulation(found: Resources, emulated: bool) -> str:
    if not emulated:
        return ""
    return "CUDA is emulated on the CPU, and Triton's kernels run in its interpreter: core takes minutes, full hours"


def _of_cores(found: Resources, emulated: bool) -> str:
    if found.jobs < 2:
        return ""
    return (
        f"a run uses one worker unless you ask for more; this machine has room for {found.jobs} (--jobs {found.jobs})"
    )


def _of_quota(found: Resources, emulated: bool) -> str:
    if found.quota is None or found.quota >= found.cores:
        return ""
    return (
        f"this container may use {found.quota:g} of {found.cores} cores; with more --jobs than that, workers only wait"
    )


def _of_memory(found: Resources, emulated: bool) -> str:
    if found.memory is None or found.jobs >= found.usable:
        return ""
    what = "this container may use" if found.limited else "this machine has"
    return (
        f"{what} {found.memory / GIGABYTE:.1f} GB of memory: room for {found.jobs} of {found.usable} workers in core; "
        "the system kills further workers"
    )


def _of_threads(found: Resources, emulated: bool) -> str:
    if found.threads in ("", "1"):
        return ""
    return (
        f"OMP_NUM_THREADS is {found.threads}: tensors are tiny here, and waiting threads spin; unset it, or set it to 1"
    )


def _of_caches(found: Resources, emulated: bool) -> str:
    cold = [folder for folder, files in found.caches.items() if not files]
    if emulated or not cold:
        return ""
    return (
        "kernels are compiled on first use, 6 to 15 s each, and no compiled kernel is stored yet in "
        f"{' and '.join(cold)}; "
        "`python -m attn_testkit.backends.vendor.warmup` compiles FlashInfer's kernels beforehand"
    )


_REASONS: tuple[_Reason, ...] = (_of_emulation, _of_cores, _of_quota, _of_memory, _of_threads, _of_caches)
