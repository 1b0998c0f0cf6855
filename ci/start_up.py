"""Time from a command to its first case-run: ``python ci/start_up.py [--times N] [ARGUMENTS of run ...]``.

Prints, for each run, the seconds from the start of the interpreter to: the command line is imported, the plan is made,
the first case-run begins, its result is there. A run ends with its first result. ``--root PATH`` takes another checkout
in turn with this one, to compare two of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

_CHILD = """
import os, sys, time
def mark(name): print(f"mark {name} {time.time() - float(os.environ['STARTED']):.3f}", flush=True)
from attn_testkit.cli import main
from attn_testkit.running.processes import judge_process
mark("imported")
class Watched(judge_process.JudgeProcess):
    def plan(self, request):
        found = super().plan(request)
        mark("planned")
        return found
    def _receive(self, kind, running=None):
        class Begun(list):
            def append(self, item):
                if "begun" not in seen:
                    seen.append("begun")
                    mark("begun")
                running.append(item)
        found = super()._receive(kind, running if running is None else Begun())
        if kind == "result":
            mark("result")
            self._process.kill()
            os._exit(0)
        return found
seen = []
judge_process.JudgeProcess = Watched
main(["run", *sys.argv[1:]])
"""
MARKS = ("imported", "planned", "begun", "result")


def once(root: Path, arguments: list[str]) -> dict[str, float]:
    """Seconds to each mark."""
    # ``date`` would be no nearer: the clock begins before the process is made.
    command = ["bash", "-c", 'STARTED=$EPOCHREALTIME exec "$0" -c "$@"', sys.executable, _CHILD, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root)} if root != HERE else dict(os.environ)
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd="/tmp").stdout
    return {words[1]: float(words[2]) for words in map(str.split, out.splitlines()) if words[0] == "mark"}


HERE = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--root", type=Path, action="append", default=[])
    known, arguments = parser.parse_known_args()
    arguments = arguments or ["-b", "torch_native", "--tier", "core", "-j", "2"]
    roots = [*known.root, HERE]
    found: dict[Path, list[dict[str, float]]] = {root: [] for root in roots}
    for _ in range(known.times):
        for root in roots:
            found[root].append(once(root, arguments))
    print("run", *arguments)
    for root, rows in found.items():
        print(root)
        for mark in MARKS:
            values = [row[mark] for row in rows if mark in row]
            print(f"  {mark:9} {statistics.median(values):6.2f} s   ({', '.join(f'{each:.2f}' for each in values)})")


if __name__ == "__main__":
    main()
