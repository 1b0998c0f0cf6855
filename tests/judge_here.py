"""A judge in the test's own process, in the place of the one that ``minimize`` and ``fuzz`` start.

How a judge in its own process answers is held by ``tests/running/test_judge_process.py``, and by one test or more
of each of the two commands.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from attn_testkit.results.case_result import CaseResult
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Item, Options, Plan

__all__ = ["Call", "JudgeHere", "interrupting", "sent_here"]

Call = Callable[..., tuple[int, str, str]]
"""Arguments of a command -> its exit code, stdout and stderr."""


class JudgeHere(Runner):
    """What ``JudgeProcess`` is, without processes.

    Each case-run has a worker of its own: Hypothesis sets the random states of this process between them, and a worker
    would take that for the backend's doing.
    """

    def __init__(self, options: Options, device: str) -> None:
        super().__init__(replace(options, in_process=True))

    capabilities = Runner.declared

    def run(self, plan: Plan, items: Sequence[Item], *, ahead: bool = True) -> Generator[CaseResult, None, None]:
        return Runner(self.options).run(plan, items, ahead=ahead)


def interrupting(how: signal.Signals, *, before: int) -> type[JudgeHere]:
    """A judge whose process gets a signal when the case-run of a number, from 1 on, is to begin."""
    runs: list[Item] = []

    class Interrupting(JudgeHere):
        def run(self, plan: Plan, items: Sequence[Item], *, ahead: bool = True) -> Generator[CaseResult, None, None]:
            runs.extend(items)
            if len(runs) == before:
                os.kill(os.getpid(), how)
            return super().run(plan, items, ahead=ahead)

    return Interrupting


@contextmanager
def sent_here() -> Iterator[None]:
    """Inside, a signal that no command takes fails the test, and ends no tests. Under nohup SIGINT would be ignored."""

    def refuse(signum: int, frame: object) -> NoReturn:
        raise AssertionError(f"nobody took {signal.Signals(signum).name}")

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, refuse),
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
