"""Runs calls of a project's own functions, each in its own process, and collects how their launches compare."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from corpus_generated import arguments, grid
from corpus_launches import BOTH_RAISE, DIFFERENT, EMULATION_RAISES, FLOATS, SAME, Launch, compared

from cuda_on_cpu import emulated_cuda

VARIANTS = 6
COMPARED = (SAME, FLOATS, DIFFERENT)
BLOCK_POINTERS = "Block pointers have been removed"


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
                text = " ".join(str(failure).split())[:300]
                place = f"{os.path.basename(where.filename)}:{where.lineno}"
                pickle.dump(f"{type(failure).__name__}: {text} [{place}]", file)
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
    status = _ended(child, 0 if error else 5)
    if os.WIFSIGNALED(status) and not error:
        error = f"died of signal {os.WTERMSIG(status)}"
    return Outcome(name, launches, error, time.monotonic() - began)


def _ended(child: int, patience: float) -> int:
    """The status of a process, which is killed with its group unless it ends in time."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


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


def compared_already(out: str) -> set[str]:
    """Kernels of which a file of outcomes has a comparison where memory was changed, or all variants, or an error in
    the middle of a package's own call."""
    seen = [(call["call"].startswith("generated "), launch) for call in _outcomes(out) for launch in call["launches"]]
    tries = collections.Counter(
        one["kernel"] for made, one in seen if made and ("wrote" in one or one["verdict"] == BOTH_RAISE)
    )
    return {
        one["kernel"]
        for made, one in seen
        if not made or tries[one["kernel"]] >= VARIANTS or (one["verdict"] in COMPARED and one.get("wrote", True))
    }


def _outcomes(out: str) -> list[dict[str, Any]]:
    if not os.path.exists(out):
        return []
    with open(out) as file:
        return list({call["call"]: call for call in map(json.loads, file)}.values())


def finished(out: str) -> set[str]:
    """Calls of a file of outcomes that came to their end, with no launch that the emulation refused."""
    bad = (EMULATION_RAISES, BOTH_RAISE, DIFFERENT)
    return {
        call["call"]
        for call in _outcomes(out)
        if not call["error"] and not any(launch["verdict"] in bad for launch in call["launches"])
    }


def without_block_pointers(out: str) -> set[str]:
    """Kernels of a file of outcomes that ask for block pointers where Triton has none."""
    return {one["kernel"] for call in _outcomes(out) for one in call["launches"] if BLOCK_POINTERS in one["detail"]}


def generated_calls(interpreter: Any, kernel: Any, out: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A kernel by itself, with each variant of generated arguments."""

    def launch(variant: int) -> None:
        given = arguments(kernel.function.fn, interpreter.InterpretedFunction, variant)
        kernel.function[grid(kernel.function.fn)](**given)

    before = {call["call"]: call["launches"] for call in _outcomes(out)}

    def known(variant: int) -> int:
        launches = before.get(f"generated {kernel.name} {variant}", [])
        compared = [launch for launch in launches if launch["verdict"] in COMPARED]
        return -1 - max(len(launch["lines"]) for launch in compared) if compared else len(launches)

    for variant in sorted(range(VARIANTS), key=known):  # those that were compared before come first
        yield f"generated {kernel.name} {variant}", lambda variant=variant: launch(variant)
