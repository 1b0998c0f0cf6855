"""The device of a run, real or emulated on a CPU. Only this module distinguishes them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from packaging.requirements import Requirement

from cuda_on_cpu import (
    LIMITS,
    Policy,
    add_device_memory,
    allocations_made,
    emulated_cuda,
    is_active,
    note_grids,
    note_launches,
    orderly_stream,
    peak_above,
    present_policy,
)
from cuda_on_cpu import (
    compiled_regions_run as compiled_regions_run,
)
from cuda_on_cpu import (
    scratch as scratch,
)

from .contract import Capabilities, ForwardMode, Requires
from .graphs.addresses import map_across
from .graphs.allocator import give_back_idle_memory
from .graphs.busy import hold
from .graphs.poison import dirty_fresh_memory, fresh_memory
from .registry import UsageError, did_you_mean

NOTES_OF_LAUNCHES = "ATTN_TESTKIT_LAUNCHES"
"""Variable with the folder in which launches of Triton kernels are noted, for ``attn-testkit compile``."""
_VERSIONED = ("torch", "triton", "flashinfer-python", "tokenspeed-mla", "numpy")


@dataclass(frozen=True)
class Environment:
    """A device to run on."""

    emulated: bool
    index: int = 0

    @property
    def device(self) -> torch.device:
        """The device that kit and backends use: always a CUDA device."""
        return torch.device("cuda", self.index)

    @property
    def kind(self) -> str:
        """Label of the device: ``cuda`` or ``emulated``."""
        return "emulated" if self.emulated else "cuda"

    @property
    def name(self) -> str:
        """Name of the device: ``NVIDIA H200 sm90``, or the CPU that emulates one."""
        if self.emulated:
            return "CPU (emulated CUDA)"
        major, minor = torch.cuda.get_device_capability(self.index)
        return f"{torch.cuda.get_device_name(self.index)} sm{major}{minor}"

    @property
    def sm(self) -> int | None:
        """Compute capability, as 90; None without a device."""
        if self.emulated:
            return None
        major, minor = torch.cuda.get_device_capability(self.index)
        return 10 * major + minor

    @property
    def limits(self) -> tuple[str, ...]:
        """Limits of what this environment can show."""
        return LIMITS if self.emulated else ()

    @property
    def poisons_fresh_memory(self) -> bool:
        """True if fresh memory holds ``fill`` in every run, and not only in controlled ones."""
        return self.emulated

    def prepare_process(self) -> None:
        """Prepare this process before Triton is imported, so that kernels run in Triton's interpreter."""
        if self.emulated and os.environ.get(NOTES_OF_LAUNCHES):
            # A backend may have other tiles under the interpreter: what is noted is the launch of a device.
            os.environ["TRITON_INTERPRET"] = "0"
        elif self.emulated:
            os.environ.setdefault("TRITON_INTERPRET", "1")
        if self.emulated:
            # A device says nothing of a NaN in a maximum; a failure would print it as the backend's own words.
            warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning, r"triton\.runtime\.interpreter")

    @contextmanager
    def active(self, fill: int = 0xFF, *, controlled: bool = False, last_first: bool = False) -> Iterator[None]:
        """Enable ordinary CUDA programs inside the block.

        ``fill``: byte of uninitialized memory. On a device only the allocator's free memory is filled, unless the run
        is ``controlled``, which is slower. ``last_first``: if the device is emulated, the last program of a launch of a
        Triton kernel runs first, and side streams are late.
        """
        if self.emulated:
            order = Policy(fill=fill, program_order="reverse", side_streams="late") if last_first else Policy(fill=fill)
            with emulated_cuda(order):
                folder = os.environ.get(NOTES_OF_LAUNCHES)
                with note_launches(folder) if folder else nullcontext():
                    yield
        else:
            with torch.cuda.device(self.index):
                give_back_idle_memory()
                dirty_fresh_memory(fill)
                with fresh_memory(fill) if controlled else nullcontext():
                    yield


@contextmanager
def launch_grids(most: tuple[int, int] | None = None) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Yield a list that gets the kernel and the grid of each Triton launch inside the block; empty on a real device.

    ``most``: an axis and the number of programs that the emulation runs there at most.
    """
    if not is_active():
        yield []
        return
    with note_grids(most) as notes:
        yield notes


def device_of_thread() -> Callable[[], AbstractContextManager[object]]:
    """A function that makes a context in which another thread uses the device as this one does: the current stream, or
    an emulation of the same policy."""
    if (policy := present_policy()) is not None:
        return lambda: emulated_cuda(policy)
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)


def keep_device_busy(wanted: bool) -> Callable[[], None]:
    """Keep the current stream busy, if ``wanted``, so that later launches start when the caller's host work is done and
    the caller calls the returned function. Emulated CUDA does all work at once, and compares data at that time with the
    data when the host waits.
    """
    return hold() if wanted and not is_active() else _nothing


def _nothing() -> None:
    pass


def delay(stream: torch.cuda.Stream) -> None:
    """Keep a stream busy for some milliseconds, so that work which does not wait for it comes first. The emulation
    compares the order of streams without that.
    """
    if not is_active():
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call, unused-ignore]


_CYCLES = 10_000_000
"""Clock cycles, about 5 ms."""


def side_stream() -> torch.cuda.Stream:
    """A side stream of the kit, which is ordered correctly: the emulation need not search for races because of it."""
    if is_active():
        return orderly_stream()  # type: ignore[return-value]
    return torch.cuda.Stream()  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


def server_stream(work: Callable[[], object]) -> torch.cuda.Stream:
    """Do ``work`` on the server's stream, after the present work of this stream. On a device the next work of this
    stream then comes after it, which is the order that reveals mistakes. The emulation treats the two as unordered.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    if not is_active():
        torch.cuda.current_stream().wait_stream(stream)
    return stream


@contextmanager
def memory_peak() -> Iterator[Callable[[], int]]:
    """Follow allocations inside the block. The yielded function returns the peak of allocated device memory above that
    at the beginning.
    """
    if is_active():
        with peak_above() as above:
            yield above
    else:
        first = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() - first


def allocations() -> int:
    """Number of allocations of device memory so far."""
    # The emulation would measure every tensor for the other values of the statistics.
    return allocations_made() if is_active() else int(torch.cuda.memory_stats()["allocation.all.allocated"])


_FOUR_GIB = 1 << 32


def memory_across_4_gib(nbytes: int, below: int) -> torch.Tensor | None:
    """Allocate [nbytes] uint8, uninitialized, so that a multiple of 4 GiB is right after the first ``below`` bytes.
    None if addresses of 4 GiB more than ``nbytes`` cannot be reserved. The tensor shares its storage with no other, and
    the unused addresses need no memory.
    """
    if not is_active():
        return map_across(_FOUR_GIB, nbytes, below)
    try:
        with torch._C.DisableTorchFunction():
            # No tensor: what fills those without numbers would fill 4 GiB.
            block = torch.UntypedStorage(_FOUR_GIB + nbytes)  # type: ignore[no-untyped-call]
            first = -(block.data_ptr() + below) % _FOUR_GIB
            # A slice of a storage is a storage, which keeps the block alive.
            own = block[first : first + nbytes]
            add_device_memory(own)
            return torch.empty(0, dtype=torch.uint8, device="cpu").set_(own)
    except RuntimeError:  # no memory: a limit of addresses
        return None


def resolve(name: str) -> Environment:
    """Find the device ``auto``, ``cuda``, ``cuda:N`` or ``cpu`` (emulated CUDA). Raises ``UsageError``."""
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise UsageError(f"unknown device {name!r}{did_you_mean(name, ('auto', 'cpu', 'cuda', 'cuda:0'))}")
    if name == "cpu":
        return Environment(emulated=True)  # a driver with several GPUs takes seconds to answer
    real = torch.cuda.is_available()
    if name == "auto" and not real:
        return Environment(emulated=True)
    if not real:
        raise UsageError(
            f"device {name!r} is not available: torch {torch.__version__} sees no CUDA device; "
            "use --device cpu for emulated CUDA"
        )
    index = int(match[1] or 0)
    if index >= torch.cuda.device_count():
        raise UsageError(f"device {name!r} does not exist; there are {torch.cuda.device_count()} CUDA devices")
    return Environment(emulated=False, index=index)


def planned(name: str, kind: str) -> Environment:
    """Return the device that ``resolve(name)`` was when a plan was made, without asking the driver."""
    return Environment(kind == "emulated", 0 if kind == "emulated" else int(name.partition(":")[2] or 0))


def missing_here(capabilities: Capabilities, environment: Environment, mode: ForwardMode | None = None) -> str:
    """The reason why the backend (in ``mode``) cannot run here, or nothing.

    Without a device, kernels are emulated, which needs the package and not the hardware. On a real device nothing is
    emulated: a mode without kernels for the device is reported as not run.
    """
    of_mode = capabilities.mode_requires.get(mode) if mode is not None else None
    for needs in (capabilities.requires, of_mode or Requires()):
        missing = _package_missing(needs.packages) or _device_missing(needs, environment)
        if missing:
            return missing
    return ""


def _device_missing(needs: Requires, environment: Environment) -> str:
    if not environment.emulated and (missing := _package_missing(needs.compilers)):
        return missing
    ranges = needs.sm_ranges
    sm = None if ranges is None else environment.sm  # a question to the driver
    if sm is None or ranges is None or needs.runs_on(sm):
        return ""
    wanted = ", ".join(f"SM{low}" if low == high else f"SM{low}-SM{high}" for low, high in ranges)
    return f"needs {wanted}, this device is SM{sm}" + (f" ({needs.why})" if needs.why else "")


def _package_missing(packages: Iterable[str]) -> str:
    return next((missing for text in packages if (missing := _missing(text))), "")


@lru_cache
def _missing(package: str) -> str:
    """Look for a package. The answer is cached: each case-run needs it twice, and a search takes milliseconds."""
    requirement = Requirement(package)
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{package} is needed, {version} is installed"
    return ""


def versions() -> dict[str, str]:
    """Versions of everything that a result may depend on."""
    return dict(_versions())


@lru_cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name.split("-")[0]] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    # Converted to a string: unpickling a TorchVersion makes every front end import torch.
    found["torch"] = str(torch.__version__)
    return found
