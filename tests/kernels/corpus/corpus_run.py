"""Runs calls of a project's own functions, each in a process of its own, and collects how their launches compare."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from attn_testkit.emulation import emulated_cuda
from corpus_launches import Launch, compared


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One call: what its launches were, and what it raised."""

    call: str
    launches: list[Launch]
    error: str
    seconds: float


class _Sent(list):  # type: ignore[type-arg]
    """A list that also writes down what is added, for a process that may not reach its end."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def append(self, item: Any) -> None:
        super().append(item)
        pickle.dump(item, self._file)
        self._file.flush()


def run(interpreter: Any, name: str, call: Callable[[], None], most: int, seconds: float) -> Outcome:
    """The call in a forked process, under the emulation, for `seconds` at most."""
    began = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        os.setpgid(0, 0)
        with os.fdopen(writing, "wb") as file:
            try:
                sent = _Sent(file)
                with emulated_cuda(), compared(interpreter, sent, most, seconds / 2):
                    call()
            except BaseException as failure:
                where = traceback.extract_tb(failure.__traceback__)[-1]
                pickle.dump(f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]} [{os.path.basename(where.filename)}:{where.lineno}]", file)
                code = 1
        os._exit(code)
    os.close(writing)
    launches: list[Launch] = []
    error = ""

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(int(seconds))
    try:
        with os.fdopen(reading, "rb") as file:
            while True:
                try:
                    item = pickle.load(file)
                except EOFError:
                    break
                if isinstance(item, Launch):
                    launches.append(item)
                else:
                    error = item
        signal.alarm(0)
    except TimeoutError:
        error = f"took more than {seconds:.0f} s"
    signal.alarm(0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and not error:
        error = f"died of signal {os.WTERMSIG(status)}"
    return Outcome(name, launches, error, time.monotonic() - began)


def run_all(
    interpreter: Any, calls: Iterable[tuple[str, Callable[[], None]]], out: str, most: int, seconds: float
) -> list[Outcome]:
    """Every call; each outcome is a line of JSON in `out` as soon as it is there."""
    outcomes = []
    with open(out, "a") as file:
        for name, call in calls:
            outcome = run(interpreter, name, call, most, seconds)
            outcomes.append(outcome)
            counts: dict[str, int] = {}
            for launch in outcome.launches:
                counts[launch.verdict] = counts.get(launch.verdict, 0) + 1
            print(f"{outcome.seconds:6.1f} s  {name}: {counts or ''} {outcome.error}", flush=True, file=sys.stderr)
            file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            file.flush()
    return outcomes
