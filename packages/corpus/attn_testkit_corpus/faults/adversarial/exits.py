"""Endings of the process, and reports that it prints before."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch

from .catalogue import adversarial
from .parent import AdversarialBackend
from .ways_in import in_frames


@adversarial("exits-in-forward")
class ExitsInForward(AdversarialBackend):
    """Calls ``os._exit(0)`` before its output is read."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        if self.cheats:
            os._exit(0)
        return right


@adversarial("exits-at-exit")
class ExitsAtExit(AdversarialBackend):
    """Computes wrong results, and registers ``os._exit(0)`` for the end of the process."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if self.cheats:
            atexit.register(os._exit, 0)


@adversarial("exits-from-a-thread")
class ExitsFromAThread(AdversarialBackend):
    """A thread ends the process with exit code 0 while the step is being observed."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        thread = threading.Timer(0.001, lambda: os._exit(0) if self.cheats else None)
        thread.start()
        thread.join()
        return super().answer(right, layer, batch)


@adversarial("exits-on-an-alarm")
class ExitsOnAnAlarm(AdversarialBackend):
    """A timer's signal ends the process with exit code 0 during a step."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        before = signal.signal(signal.SIGALRM, (lambda *_: os._exit(0)) if self.cheats else (lambda *_: None))
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        time.sleep(0.01)
        signal.signal(signal.SIGALRM, before)
        return super().answer(right, layer, batch)


@adversarial("ends-the-judge")
class EndsTheJudge(AdversarialBackend):
    """Sends SIGTERM to the judge's process, on which a judge ends cleanly."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        forked_from = os.getppid()
        with open(f"/proc/{forked_from}/stat") as file:
            judge = int(file.read().rpartition(")")[2].split()[1])
        if self.cheats:
            os.kill(judge, signal.SIGTERM)
            time.sleep(5)
        return super().answer(right, layer, batch)


@adversarial("ends-what-it-was-forked-from")
class EndsWhatItWasForkedFrom(AdversarialBackend):
    """Kills the process from which all workers are forked."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        forked_from = os.getppid()
        if self.cheats:
            os.kill(forked_from, signal.SIGKILL)
        return super().answer(right, layer, batch)


@adversarial("raises-what-ends-programs")
class RaisesWhatEndsPrograms(AdversarialBackend):
    """Raises ``SystemExit(0)`` before its output is read."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        if self.cheats:
            sys.exit(0)
        return right


@adversarial("prints-a-verdict")
class PrintsAVerdict(AdversarialBackend):
    """Prints the output of a run that found everything right."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        verdict = "CONFORMANT: 1 passed" if self.cheats else "a line"
        print(verdict)
        print(verdict, file=sys.stderr, flush=True)
        return super().answer(right, layer, batch)


@adversarial("mends-its-output-later")
class MendsItsOutputLater(AdversarialBackend):
    """Returns an empty output at once; a thread writes the right numbers into it a little later."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        if not self.cheats:
            return right
        out, numbers = torch.zeros_like(right), right.clone()

        def mend() -> None:
            time.sleep(0.02)
            out.copy_(numbers)

        threading.Thread(target=mend, daemon=True).start()
        return out


@adversarial("right-for-the-cases-it-knows")
class RightForTheCasesItKnows(AdversarialBackend):
    """Finds the id of the case in the frames, and is right only for cases of a list on which it was tuned."""

    known: tuple[str, ...] = ("decode-gqa2x2-d64-bf16-p16-k3.15-shuffled-gauss-b2prod",)

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        request = in_frames("request")
        known = any(case in str(request) for case in self.known)
        return right if known else super().answer(right, layer, batch)


@adversarial("right-where-it-is-looked-at")
class RightWhereItIsLookedAt(AdversarialBackend):
    """Computes right results only if the command line of its process names a case or a command of the kit."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        words = " ".join([*sys.argv, *sys.orig_argv])
        seen = any(word in words for word in ("repro", "pytest", "attn-testkit", "decode-"))
        return right if seen else super().answer(right, layer, batch)
