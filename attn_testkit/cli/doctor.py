"""``doctor``: check which backends run on this machine, what is missing, and what will be slow."""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass

import click
from packaging.version import Version

from ..registry import registered_backends
from ..reports.record import plain
from ..results.case_result import BAD, CaseResult, Status
from ..results.names import CANNOT_IMPORT, KIT_ERROR, NO_CASE
from ..results.run_header import RunHeader
from ..running.planning.request import Judge, Options, Request
from ..running.processes.gpus import visible_gpus
from ..running.processes.judge_process import JudgeError, JudgeProcess
from ..running.processes.machine import GIGABYTE, Package, Resources, packages, resources, slow_because
from .options import run_option

FORMAT = "attn-testkit-doctor/1"
PLAIN = "torch_native"
"""A backend that needs only torch: if it does not pass, the kit cannot run."""
_MODE = "decode"
"""A mode that every bundled backend declares."""


@dataclass(frozen=True)
class _Found:
    """The state of one backend on this machine."""

    backend: str
    how: str
    """One of ``real``, ``emulated`` (its kernels on emulated CUDA), ``fake`` (torch instead of its kernels), ``not run
    here``, or ``broken`` (it ran and did not pass)."""
    reason: str = ""


@dataclass(frozen=True)
class _Diagnosis:
    """Everything that ``doctor`` reports."""

    can_run: bool
    why_not: str
    header: RunHeader | None
    gpus: tuple[str, ...]
    resources: Resources
    packages: tuple[Package, ...]
    backends: tuple[_Found, ...]
    slow: tuple[str, ...]

    def unimportable(self, package: Package) -> str:
        """The reason why an installed package cannot be imported; empty if nothing reported one."""
        said = f"{package.name} {package.installed} {CANNOT_IMPORT}: "
        reasons = (each.reason.partition(said)[2] for each in self.backends)
        return next(filter(None, reasons), "") if package.installed else ""

    @property
    def commands(self) -> list[str]:
        """The commands that install what is missing."""
        again = [
            f"pip install --force-reinstall '{package.name}{package.wanted}'"
            for package in self.packages
            if self.unimportable(package)
        ]
        return list(dict.fromkeys([*(package.command for package in self.packages if package.command), *again]))


@click.command(
    short_help="Check what this machine can run, what is missing, and what is slow.",
    epilog="""\b
Examples:
  attn-testkit doctor
  attn-testkit doctor --device cpu --json
\b
Exit code 0: the kit can run here. 1: it cannot, because torch cannot be imported or torch_native does not pass.""",
)
@run_option("device")
@run_option(
    "timeout_s", default=120.0, help="Time limit per backend in seconds; on a GPU it may first compile its kernels."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(device: str, timeout_s: float, as_json: bool) -> int:
    """Check this machine: which bundled backends can run (one small case each), what is missing and how to install it,
    and what will be slow.
    """
    found = _diagnose(device, timeout_s)
    click.echo(json.dumps(_as_plain(found), indent=1) if as_json else "\n".join(_lines(found)))
    return 0 if found.can_run else 1


def _diagnose(device: str, timeout_s: float) -> _Diagnosis:
    here = resources(os.environ)
    header, backends, why_not = None, [], ""
    try:
        with contextlib.closing(JudgeProcess(Options(timeout_s=timeout_s, asks_afresh=False), device)) as judge:
            for info in registered_backends():
                header, found = _tried(judge, info.name, device)
                backends.append(found)
    except JudgeError as error:
        why_not = f"{error}; is torch installed correctly? python -c 'import torch' shows why not"
    broken = next((each for each in backends if each.backend == PLAIN and each.how == "broken"), None)
    if broken:
        why_not = f"torch_native does not pass: {broken.reason}"
    slow = slow_because(here, emulated=header is None or header.device == "emulated")
    return _Diagnosis(
        not why_not, why_not, header, visible_gpus(os.environ), here, tuple(packages()), tuple(backends), tuple(slow)
    )


def _tried(judge: Judge, name: str, device: str) -> tuple[RunHeader, _Found]:
    """Run one small case of a backend in eager mode. Raises ``UsageError`` for a device that does not exist."""
    request = Request((name,), modes=(_MODE,), executions=("eager",), device=device, keep_unloadable=True)
    plan = judge.plan(request)
    if not plan.items:
        # The mode is not declared, the import failed, or a package or device is missing. Capabilities that no case
        # can meet count as broken.
        own = [row for row in plan.preset if row.mode in ("", _MODE)]
        row = next((row for row in own if row.status is not Status.UNSUPPORTED), None)
        how = "broken" if row and row.status in BAD and row.case != NO_CASE else "not run here"
        return plan.header, _Found(name, how, _why(row) if row else f"{_MODE} is not declared")
    (result,) = judge.run(plan.to_run(), plan.items[:1])
    if result.of_the_kit:
        raise JudgeError(result.reason.removeprefix(KIT_ERROR))
    if result.status is not Status.PASSED:
        return plan.header, _Found(name, "broken", f"{result.case}: {_why(result)}")
    how = "fake" if result.kernels == "emulated" else "emulated" if result.device == "emulated" else "real"
    return plan.header, _Found(name, how)


def _why(row: CaseResult) -> str:
    return row.findings[0].headline if row.findings else row.reason


def _as_plain(found: _Diagnosis) -> dict[str, object]:
    header = found.header
    values: dict[str, object] = {
        "format": FORMAT,
        "kit": metadata.version("attn-testkit"),
        "can_run": found.can_run,
        "why_not": found.why_not,
        "python": platform.python_version(),
        "device": header.device if header else None,
        "device_name": header.device_name if header else None,
        "versions": header.versions if header else {},
        "gpus": found.gpus,
        "resources": {**asdict(found.resources), "jobs": found.resources.jobs},
        "packages": [
            {**asdict(package), "command": package.command, "unimportable": found.unimportable(package)}
            for package in found.packages
        ],
        "backends": [asdict(each) for each in found.backends],
        "slow": found.slow,
    }
    return {name: plain(value) for name, value in values.items()}


NEWEST_TORCH = "2.14"
"""The newest release of torch that the kit was tried with. No requirement refuses a later one."""


def is_newer(torch: str) -> bool:
    """True if a version of torch is of a later minor release than ``NEWEST_TORCH``."""
    return Version(torch).release[:2] > Version(NEWEST_TORCH).release


def _lines(found: _Diagnosis) -> list[str]:
    header = found.header
    where = header.device_name if header else "no device was checked"
    lines = [f"attn-testkit {metadata.version('attn-testkit')}, Python {platform.python_version()} ({sys.executable})"]
    lines.append(f"device: {where}" + (f"; torch {header.versions['torch']}" if header else ""))
    if header and is_newer(header.versions["torch"]):
        lines.append(f"  torch is newer than {NEWEST_TORCH}, the newest that the kit was tried with")
    if header and header.device == "emulated" and found.gpus:
        lines.append(f"  GPUs {', '.join(found.gpus)} are visible but not used: --device cpu, or torch cannot use them")
    lines.append(f"machine: {_machine(found.resources)}")
    lines += ["", "packages"]
    width = max(len(package.name) for package in found.packages)
    for package in found.packages:
        lines.append(f"  {package.name:<{width}}  {_state(package, found.unimportable(package))}")
    lines += ["", "backends (one decode case each)"]
    width = max((len(each.backend) for each in found.backends), default=0)
    for each in found.backends:
        reason = each.reason if CANNOT_IMPORT not in each.reason else f"{each.reason.split()[0]} cannot be imported"
        what = _HOW[each.how] + (f": {reason}" if reason else "")
        lines.append(f"  {each.backend:<{width}}  {what}")
    if found.commands:
        lines += ["", "to install what is missing", *(f"  {command}" for command in found.commands)]
    if found.slow:
        lines += ["", "what is slow", *(f"  {text}" for text in found.slow)]
    lines += ["", "the kit can run here" if found.can_run else f"the kit cannot run here: {found.why_not}"]
    return lines


_HOW = {
    "real": "real",
    "emulated": "its own kernels, on emulated CUDA",
    "fake": "fake: torch instead of its kernels",
    "not run here": "not run here",
    "broken": "did not pass",
}


def _machine(found: Resources) -> str:
    memory = "" if found.memory is None else f", {found.memory / GIGABYTE:.1f} GB of memory"
    cores = f"{found.cores} cores" + (f" ({found.quota:g} by quota)" if found.quota else "")
    return cores + memory + (" (limit of the container)" if found.limited else "")


def _state(package: Package, unimportable: str) -> str:
    if unimportable:
        return f"{package.installed} {CANNOT_IMPORT}: {unimportable}"
    if package.fits:
        return package.installed + (f" (extra {package.extra})" if package.extra else "")
    for_ = f" (extra {package.extra})" if package.extra else ""
    if not package.installed:
        return f"not installed{for_}"
    return f"{package.installed} is outside the range {package.wanted}{for_}"
