"""Runs smoke while a random process of the kit is killed every few seconds, and counts what became of each case-run.

    python ci/random_kills.py --seeds 10
    python ci/random_kills.py --seeds 3 --every 1 --jobs 1 --backend triton

Killed is any process of the run but the front end: judge, lanes, workers, and the processes that these are forked from.
A worker that is killed is a crash of the backend, as it would be for a user. The seconds are those of a quiet machine:
a kill waits, too, until the run has used as many seconds of a core since the one before. Exits with 1 if a planned
case-run has no result or two, if a run did not come to its end, or if a process is left over.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attn_testkit.reports.record import read_report
from attn_testkit.results.case_result import BAD, Status

__all__ = ["JUDGE", "LANE", "LANES_SERVER", "SERVER", "TRACKER", "WORKER", "Outcome", "kinds", "run_with_kills"]

JUDGE, LANE, WORKER = "judge", "lane", "worker"
SERVER, LANES_SERVER, TRACKER = "fork server", "fork server of a lane", "tracker"
ORPHAN = "orphan"
"""A process whose parent was killed: the kit ends it, and it may be any."""
_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER``: processes whose parent is killed become children of this one, and are found."""
_POLL = 0.05
_GRACE = 30.0
"""Seconds for the processes of a run that has ended to end."""


_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A line of the table of processes."""

    parent: int
    group: int
    command: str


def processes() -> dict[int, Process]:
    """Every process that has not ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent, group, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = Process(int(parent), int(group), command)
    return found


def core_seconds() -> float:
    """Seconds of a core that this process's descendants have used, those that have ended included."""
    of = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            # Its own, and those of children that it has waited for.
            of[int(file.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    tree = {os.getpid()}
    while more := {pid for pid, (parent, _) in of.items() if parent in tree} - tree:
        tree |= more
    ended = os.times()
    own = tree - {os.getpid()}
    return sum(of[pid][1] for pid in own) / _TICKS + ended.children_user + ended.children_system


def kinds(front_end: int, root: int = 0) -> dict[int, str]:
    """Kind of each process that a front end has started. ``root``: of each that this process has, orphans included."""
    table = processes()
    tree = {root or front_end}
    while more := {pid for pid, each in table.items() if each.parent in tree} - tree:
        tree |= more
    return {pid: _kind(pid, front_end, table) for pid in sorted(tree - {root, front_end})}


def _kind(pid: int, front_end: int, table: Mapping[int, Process]) -> str:
    this = table[pid]
    if this.parent == front_end:
        return JUDGE
    if "resource_tracker" in this.command:
        return TRACKER
    leader = table.get(this.group)
    if this.group != pid:
        return SERVER if leader and leader.parent == front_end else LANES_SERVER
    # A judge with several jobs forks lanes from its server, and they fork workers from theirs.
    server = table.get(this.parent)
    above = table.get(server.group) if server else None
    if above is None or server is None or server.group == this.parent:
        return ORPHAN
    servers = any(each.group == pid and other != pid for other, each in table.items())
    return LANE if above.parent == front_end and servers else WORKER


@dataclass(frozen=True)
class Outcome:
    """What became of the case-runs of one run."""

    planned: int
    results: int
    twice: int
    repeated: int
    kit: int
    other: Mapping[Status, int]
    """Results that are neither passed nor an error of the kit."""
    code: int
    killed: Mapping[str, int]
    left: int
    """Processes that were left over."""
    seconds: float

    @property
    def is_complete(self) -> bool:
        """True if each planned case-run has one result and nothing is left over."""
        return self.results == self.planned > 0 and not self.twice and not self.left

    def __str__(self) -> str:
        killed = ", ".join(f"{count} {kind}" for kind, count in sorted(self.killed.items()))
        other = ", ".join(f"{count} {status}" for status, count in self.other.items()) or "-"
        return (
            f"{self.planned:7} {self.results:7} {self.repeated:8} {self.kit:10} {other:12} {self.code:4} {self.left:4} "
            f"{self.seconds:7.1f}  {killed}"
        )


HEADER = "seed planned results repeated kit errors other        exit left seconds  killed"


def run_with_kills(backend: str, seed: int, every: float, jobs: int, keep: str = "") -> Outcome:
    """Run smoke of a backend, and kill a random process of it every few seconds. ``keep``: folder of results files."""
    draw, killed, began = random.Random(seed), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        record, output = Path(keep or folder, f"seed{seed}.json"), Path(folder, "output")
        command = [sys.executable, "-m", "attn_testkit", "run", "--backend", backend, "--device", "cpu"]
        command += ["--tier", "smoke", "-j", str(jobs), "--json", str(record)]
        with output.open("wb") as file:
            front_end = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        last, used = began, core_seconds()
        while (code := front_end.poll()) is None:
            time.sleep(_POLL)
            if time.monotonic() - last < every or core_seconds() - used < every:
                continue
            if there := kinds(front_end.pid, os.getpid()):
                pid = draw.choice(sorted(there))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed[there[pid]] += 1
                last, used = time.monotonic(), core_seconds()
        seconds = time.monotonic() - began
        left = _left()
        if not record.exists():
            print(output.read_text()[-2000:])
            return Outcome(0, 0, 0, 0, 0, {}, code, killed, left, seconds)
        report = read_report(str(record))
        if not report.finished:
            print(output.read_text()[-2000:])
    rows = [row for row in report.results if row.is_case_run]
    counts = Counter((row.backend, row.execution, row.case) for row in rows)
    others = Counter(row.status for row in rows if row.status in BAD and not row.of_the_kit)
    return Outcome(
        report.header.planned,
        len(counts),
        sum(count > 1 for count in counts.values()),
        sum(bool(row.repeated) for row in rows),
        sum(row.of_the_kit for row in rows),
        others,
        code,
        killed,
        left,
        seconds,
    )


def _left() -> int:
    """Number of processes that a run has left, which are killed."""
    until = time.monotonic() + _GRACE
    while (left := kinds(0, os.getpid())) and time.monotonic() < until:
        time.sleep(0.1)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def main() -> int:
    """Print a line for each seed."""
    parser = argparse.ArgumentParser(description="Smoke while random processes of the kit are killed.")
    parser.add_argument("--backend", default="torch_native")
    parser.add_argument("--seeds", type=int, default=10, help="number of runs; default: 10")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--every", type=float, default=2.5, metavar="S", help="seconds between two kills; default: 2.5")
    parser.add_argument("--jobs", "-j", type=int, default=2)
    parser.add_argument("--keep", default="", metavar="FOLDER", help="keep the results files there")
    wanted = parser.parse_args()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    print(HEADER)
    complete = True
    for seed in range(wanted.first, wanted.first + wanted.seeds):
        outcome = run_with_kills(wanted.backend, seed, wanted.every, wanted.jobs, wanted.keep)
        print(f"{seed:4} {outcome}", flush=True)
        complete &= outcome.is_complete
    return not complete


if __name__ == "__main__":
    sys.exit(main())
