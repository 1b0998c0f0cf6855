"""GPUs that this process may use, and how workers share them. Never touches CUDA."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass, replace

NO_DAEMON = "/nonexistent/attn-testkit"
"""Value of ``CUDA_MPS_PIPE_DIRECTORY`` with which a process finds no daemon of MPS, even if one runs on the machine."""


@dataclass(frozen=True)
class Gpu:
    """The GPU of a lane, and how the workers of that lane reach it."""

    visible: str = ""
    """Value of ``CUDA_VISIBLE_DEVICES``; empty: that of this process."""
    mps: str = ""
    """Folder in which workers find the daemon of MPS, or ``NO_DAEMON``; empty: what this process has in its environment
    holds."""
    visible_in_mps: str = ""
    """Value of ``CUDA_VISIBLE_DEVICES`` for clients of the daemon; empty: ``visible``."""

    @property
    def in_mps(self) -> bool:
        """True if workers share the GPU by MPS, so that a fatal fault of one of them ends what the others run there."""
        return self.mps not in ("", NO_DAEMON)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a worker, to be set before it asks the driver for anything."""
        visible = (self.in_mps and self.visible_in_mps) or self.visible
        named = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_MPS_PIPE_DIRECTORY": self.mps}
        return {name: value for name, value in named.items() if value}

    def without_mps(self) -> Gpu:
        """The same GPU for workers with a context of their own."""
        return replace(self, mps=NO_DAEMON, visible_in_mps="")


ANY_GPU = Gpu()
"""All GPUs that are visible in the environment of this process."""


def visible_gpus(environment: Mapping[str, str], devices: str = "/dev/nvidia[0-9]*") -> tuple[str, ...]:
    """``CUDA_VISIBLE_DEVICES`` values, one for each GPU that the caller left visible, in the caller's own spelling.

    A bare ordinal would reach a GPU that the caller excluded, so workers always pick from this list.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(str(index) for index in range(len(glob.glob(devices))))
    gpus: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        # CUDA itself stops at the first entry that names no device.
        if not entry or entry.startswith("-"):
            break
        gpus.append(entry)
    return tuple(gpus)


class GpuSlots:
    """Assigns the least used GPU to each worker, until the worker ends.

    Worker numbers cannot be used: a replacement has a new one, and would share a GPU with a worker that still runs.
    """

    def __init__(self, gpus: tuple[str, ...]) -> None:
        self._users: dict[str, set[str]] = {gpu: set() for gpu in gpus}

    def take(self, worker: str) -> str:
        """The GPU for this worker; ``""`` if there is none to choose."""
        if not self._users:
            return ""
        gpu = min(self._users, key=lambda name: len(self._users[name]))
        self._users[gpu].add(worker)
        return gpu

    def free(self, worker: str) -> None:
        """The worker has ended."""
        for users in self._users.values():
            users.discard(worker)
