"""The README's example does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_two_lines_around_a_test_find_what_the_readme_says(tmp_path):
    text = README.read_text()
    two, example, *_ = re.findall(r"```python\n(.*?)```", text, re.S)
    (said,) = re.findall(r"```\n(DanglingMemoryError: .*?)```", text, re.S)
    first, second = two.splitlines()
    (tmp_path / "example.py").write_text(f"{example}\n{first}\n{second}\n")
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert " ".join(said.split()) in " ".join(done.stderr.split())
