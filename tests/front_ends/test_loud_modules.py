"""Modules that print where they are imported: data on stdout stays data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

LOUD = """
import os, sys
print("noise on stdout")
sys.stdout.write("no end of line"); sys.stdout.flush()
os.write(1, b"and below Python")
print("noise on stderr", file=sys.stderr)
from attn_testkit.examples import MinimalBackend

class Loud(MinimalBackend):
    pass
"""


def test_a_registered_module_that_prints_at_import_does_not_break_the_list(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    (tmp_path / "gone.py").write_text("raise ImportError('libkernels.so is not there')\n")
    info = tmp_path / "loud-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attn_testkit.backends]\nloud = loud:Loud\ngone = gone:Gone\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-m", "attn_testkit", "list", "--json", "--device", "cpu"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    listed = {backend["name"]: backend for backend in json.loads(done.stdout)}
    assert listed["loud"]["capabilities"]
    assert listed["loud"]["origin"] == "loud 1.0"
    assert "importing gone failed: ImportError: libkernels.so is not there" in listed["gone"]["failure"]
    assert {"torch_native", "triton"} <= listed.keys(), "one that does not import takes no other along"
