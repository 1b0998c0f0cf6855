"""CPU time of case-runs: samples of the stack, each counted once, by step and by package of the kit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType

__all__ = ["STEPS", "Frame", "Sampler", "parts"]

Frame = tuple[str, str]
"""File and function."""

STEPS = {
    ("harness.py", "__init__"): "backend, KV pool and model built",
    ("harness.py", "prepare_capture"): "numbers in place",
    ("harness.py", "load"): "numbers in place",
    ("replay.py", "fill_static"): "numbers in place",
    ("batches.py", "eager_batch"): "batches",
    ("batches.py", "batch_on_device"): "batches",
    ("replay.py", "view_of"): "batches",
    ("eager.py", "_poison_heap"): "free memory poisoned",
    ("poison.py", "churn"): "free memory poisoned",
    ("eager.py", "run_eager"): "eager plans and forwards",
    ("capture.py", "warm_up"): "warm-ups",
    ("capture.py", "record"): "captures",
    ("replay.py", "replay"): "plans and replays",
    ("observe.py", "observe"): "read back",
    ("worker_main.py", "_changed"): "process compared",
    ("capabilities.py", "refuses_undeclared"): "what is not declared is refused",
    ("environment.py", "active"): "device entered and left",
    ("evaluate.py", "_evaluate_step"): "oracle and checks",
}
"""Name of a file and function -> the step that it is; what it calls belongs to it unless that is a separate step."""
_REST = "the rest"
_EMULATION = f"{os.sep}cuda_on_cpu{os.sep}"
_KIT = re.compile(rf"{re.escape(os.sep)}attn_testkit(?:_corpus|_servers)?{re.escape(os.sep)}")
_MODES = f"{os.sep}runner_modes{os.sep}"
_EVERY = 0.001
"""Seconds of CPU time between two samples, where the system measures as finely."""


def _room(file: str) -> str:
    """The package of the kit that a file belongs to; empty for any other file."""
    if _MODES in file:
        return "runner_modes"
    if _EMULATION in file:
        return "cuda_on_cpu"
    *_, inside = _KIT.split(file)
    return "" if inside == file else inside.partition(os.sep)[0].removesuffix(".py")


def parts(stacks: Sequence[tuple[Sequence[Frame], int]]) -> list[tuple[str, float, dict[str, float]]]:
    """Triples of step, its part, and the part of each package in it, the largest first. All parts add up to 1.

    ``stacks``: frames, the innermost first, and how often they were seen. A sample belongs to the package of the
    innermost frame of the kit, with what that calls of torch, and to the innermost step.
    """
    total = sum(count for _, count in stacks)
    found: dict[str, Counter[str]] = {}
    for frames, count in stacks:
        names = ((os.path.basename(file), function) for file, function in frames if _room(file))
        step = next((STEPS[name] for name in names if name in STEPS), _REST)
        room = next((room for file, _ in frames if (room := _room(file))), "Python")
        found.setdefault(step, Counter())[room] += count
    rows = [
        (step, rooms.total() / total, {room: count / total for room, count in rooms.most_common()})
        for step, rooms in found.items()
    ]
    return sorted(rows, key=lambda row: -row[1])


class Sampler:
    """A sampler of this thread, which must be the main one.

    It must be made before a worker, which compares the handlers of signals before and after a run.
    """

    def __init__(self) -> None:
        self._seen: Counter[tuple[Frame, ...]] = Counter()
        signal.signal(signal.SIGPROF, self._note)

    def _note(self, _: int, frame: FrameType | None) -> None:
        frames: list[Frame] = []
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        self._seen[tuple(frames)] += 1

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Take samples while the block runs, and forget those of another block."""
        self._seen.clear()
        signal.setitimer(signal.ITIMER_PROF, _EVERY, _EVERY)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def parts(self) -> list[tuple[str, float, dict[str, float]]]:
        """See the function of that name."""
        return parts(list(self._seen.items()))
