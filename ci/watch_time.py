"""Time from a save to the first line of ``run --watch``: ``python ci/watch_time.py FILE.py [ARGUMENTS of run ...]``.

A copy of the file is watched, and a comment is added to it N times. A line is the first one with a result.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def saves(file: Path, times: int, arguments: list[str]) -> list[float]:
    """Seconds from each save to the first result after it; the first number is that from the command to its first."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, file.name)
        shutil.copy(file, copy)
        command = [sys.executable, "-m", "attn_testkit", "run", file.name, "--watch", *arguments]
        # The folder of the files, and not that of this checkout, is the current one.
        environment = {**os.environ, "ATTN_TESTKIT_CACHE": folder}
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        began = time.monotonic()
        for line in process.stderr:
            if re.match(r"  [\d.]+ s: ", line) and len(found) <= times and began:
                found.append(time.monotonic() - began)
                began = 0.0
            if "Ctrl-C ends" in line:
                if len(found) > times:
                    process.send_signal(signal.SIGINT)
                    break
                began = time.monotonic()
                copy.write_text(copy.read_text() + "#\n")
        process.wait()
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--times", type=int, default=5)
    known, arguments = parser.parse_known_args()
    first, *rest = saves(known.file, known.times, arguments)
    print(f"command to first result {first:.2f} s")
    print(f"save to first result {statistics.median(rest):.2f} s ({', '.join(f'{each:.2f}' for each in rest)})")


if __name__ == "__main__":
    main()
