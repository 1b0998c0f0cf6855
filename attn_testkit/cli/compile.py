"""``compile``: compile a backend's Triton kernels for GPUs that this machine lacks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from typing import Any

import click

from ..registry import INSTALL_TRITON, UsageError
from ..running.check_backend import check_backend
from .options import one_backend, run_option, seconds_option

TARGETS = ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm120")
"""Names of devices, as in ``emulation/compile_for.py``, which imports torch."""


@click.command(
    "compile",
    short_help="Compile a backend's Triton kernels for GPUs that this machine lacks.",
    epilog="""\b
Examples:
  attn-testkit compile --backend triton --for sm90,sm100
  attn-testkit compile --backend my_pkg.attn:MyBackend --for sm100 --mode decode --json compiled.json
\b
Exit code 0: all compiled, which does not mean CONFORMANT. 1: a target refuses a launch. 5: nothing was launched.""",
)
@one_backend
@click.option(
    "--for", "targets", required=True, metavar="TARGETS",
    help=f"Devices, separated by commas: {', '.join(TARGETS)}.",
)  # fmt: skip
@run_option("modes")
@run_option("tier")
@run_option("cases")
@seconds_option(60.0, "For one launch.")
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Write the results to a file.")
def compile_(backend: str, targets: str, seconds: float, json_file: str | None, **selected: Any) -> int:
    """Run a tier in eager mode on emulated CUDA, and pass each kind of launch of a Triton kernel to Triton's compiler.
    The command reports launches that a target refuses, and each kernel's shared memory, registers and stack. A kernel
    runs in Triton's interpreter with any tile; a device has limits.
    """
    unknown = [each for each in targets.split(",") if each not in TARGETS]
    if unknown:
        raise UsageError(f"--for has no {unknown[0]}; it has {', '.join(TARGETS)}")
    if importlib.util.find_spec("triton") is None:
        raise UsageError(f"compile needs Triton: {INSTALL_TRITON}")
    with tempfile.TemporaryDirectory() as folder:
        from unittest import mock  # with asyncio: a tenth of the start of every command

        with mock.patch.dict(os.environ, ATTN_TESTKIT_LAUNCHES=folder):
            check_backend(backend, device="cpu", executions=["eager"], diagnose="none", **selected)
        if not os.listdir(folder):
            click.echo("no Triton kernel was launched", err=True)
            return 5
        words = ["compile", "--compile-for", targets, "--seconds", str(seconds)]
        words += ["--json", json_file] if json_file else []
        return subprocess.call([sys.executable, "-W", "ignore", "-m", "cuda_on_cpu", *words, folder])
