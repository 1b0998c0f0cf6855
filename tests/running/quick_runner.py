"""A ``Runner`` for ``test_judge_process``: the case of an item says what happens, and torch stays away.

Where ``gpus`` are given, the first names a file for its notes, and ``timeout_s`` is how long it takes to close.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.running.planning.request import Item


class Runner:
    def __init__(self, options: Any) -> None:
        self.options = options

    def plan(self, request: Any) -> Any:
        if request == "usage":
            raise UsageError("no case matches 'x'")
        if request == "options":
            return self.options
        named = ("TRITON_INTERPRET", "OMP_NUM_THREADS")
        return os.getpid(), os.getsid(0), {name: os.environ.get(name) for name in named}

    def capabilities_lines(self, specs: Sequence[str], device: str) -> list[tuple[str, str]]:
        return [(f"{spec} on {device}", "") for spec in specs]

    def device_name(self, device: str) -> str:
        return f"name of {device}"

    def run(self, plan: Any, items: Sequence[Item]) -> Iterator[CaseResult]:
        try:
            for item in items:
                if item.case == "dies at once":
                    os._exit(9)
                self.begun(item)  # type: ignore[attr-defined]
                if item.case == "bug":
                    raise ZeroDivisionError("a bug of the kit")
                if item.case == "dies" or (item.case == "dies once" and not item.lost):
                    os._exit(9)
                if item.case == "lingers":
                    os.closerange(3, 64)
                    time.sleep(0.5)
                    os._exit(7)
                if item.case == "prints":
                    print("noise on stdout", flush=True)
                yield CaseResult("", "", "", item.case, Status.PASSED, repeated=item.lost)
        finally:
            note(plan, "given up or done")

    def close(self) -> None:
        if self.options.gpus:
            note(self.options.gpus[0], "closing")
            time.sleep(self.options.timeout_s)
            note(self.options.gpus[0], "closed")


def note(file: str, text: str) -> None:
    """For the test to read when this process is gone."""
    if file:
        with Path(file).open("a") as notes:
            notes.write(f"{text}\n")
