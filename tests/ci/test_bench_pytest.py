"""ci/bench_pytest.py: it can be run, on what it says. Nothing is timed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CI = Path(__file__).resolve().parents[2] / "ci"


def test_each_form_is_collected_and_run() -> None:
    command = [sys.executable, str(CI / "bench_pytest.py"), "--cases", "5", "--runs", "5"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    for form in ("pytest alone", "conformance_cases", "the suite"):
        assert re.search(rf"^{form}: start [\d.]+ s, 5 collected in -?[\d.]+ s$", found.stdout, re.MULTILINE)
        assert re.search(rf"^{form}: -?[\d.]+ ms for each case-run that runs$", found.stdout, re.MULTILINE)
