"""Launches of ``target_programs.py``, compiled without a device: ``python compile_targets.py sm90,sm100 [NAME ...]``.

It needs ``TRITON_INTERPRET=0``, and prints a line of JSON for each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from target_programs import LAUNCHES, Launch

from cuda_on_cpu import emulated_cuda
from cuda_on_cpu.compile_for import Compiled, compile_for
from cuda_on_cpu.launch_log import note_launches, read_notes


def compiled(targets: str, names: Sequence[str]) -> Iterator[tuple[Launch, Compiled]]:
    """Launches, all without ``names``, with what comes of each on each target."""
    chosen = [launch for launch in LAUNCHES if not names or launch.name in names]
    notes = []
    for launch in chosen:
        with tempfile.TemporaryDirectory() as folder:
            with torch.no_grad(), emulated_cuda(), note_launches(folder):
                launch.kernel[(1,)](*launch.arguments(), **dict(launch.options))
            notes += read_notes(Path(folder))
    for target in targets.split(","):
        yield from zip(chosen, compile_for(target, notes), strict=True)


if __name__ == "__main__":
    for launch, made in compiled(sys.argv[1], sys.argv[2:]):
        said = {
            name: getattr(made, name)
            for name in ("target", "refused", "unknown", "shared", "registers", "stack", "uses")
        }
        print(json.dumps({"name": launch.name, **said}), flush=True)
