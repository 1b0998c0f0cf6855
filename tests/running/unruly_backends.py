"""Backends that do something to their process, each in one place. Right otherwise, unless the name says more."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import BackendContext


class Wrong(TorchNativeBackend):
    """Three quarters of the right output."""

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        return super().forward(*args, **more) * 0.75


class AfterForward(TorchNativeBackend):
    """Does something in every forward of a batch of three."""

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        out = super().forward(*args, **more)
        batch = args[4]
        if batch.batch_size == 3:
            self.act()
        return out

    def act(self) -> None:
        raise NotImplementedError


class Segfaults(AfterForward):
    def act(self) -> None:
        print("about to read a freed page", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


class ExitsInForward(AfterForward):
    def act(self) -> None:
        os._exit(0)


class QuitsInForward(AfterForward):
    def act(self) -> None:
        sys.exit(0)


class RaisesBaseException(AfterForward):
    def act(self) -> None:
        raise GeneratorExit("a BaseException that nobody catches")


class HangsInForward(AfterForward):
    def act(self) -> None:
        time.sleep(600)


class LosesTheDevice(AfterForward):
    def act(self) -> None:
        print("kernel.cu:12: Assertion `slot < size` failed.", file=sys.stderr, flush=True)
        raise RuntimeError("CUDA error: device-side assert triggered")


class ReportsPid(TorchNativeBackend):
    """Fails, and its message names the process and its GPUs."""

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        raise ValueError(f"pid {os.getpid()} gpu {os.environ.get('CUDA_VISIBLE_DEVICES', '')}")


class ReportsPidAgain(ReportsPid):
    """The same by another name: another backend."""


class ExitsInConstructor(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        os._exit(0)


class WrongAndExitsAtExit(Wrong):
    def __init__(self, context: BackendContext) -> None:
        import atexit

        super().__init__(context)
        atexit.register(os._exit, 0)


class WrongAndReplacesJudge(Wrong):
    """Replaces what would judge it, if that were in this process."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        import attn_testkit.checks.numeric
        import attn_testkit.checks.step
        import attn_testkit.results.case_result
        import attn_testkit.results.run_header
        import attn_testkit.running.case_runs.evaluate

        attn_testkit.checks.step.evaluate_step = lambda *args: []
        attn_testkit.running.case_runs.evaluate.evaluate_step = lambda *args: []
        attn_testkit.checks.numeric.matches_oracle = lambda *args: []
        attn_testkit.results.case_result.BAD = frozenset()
        attn_testkit.results.run_header.exit_code = lambda *args, **more: 0


class ReplacesAFunctionOfTheHarness(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        import attn_testkit.runner_modes.eager as eager

        original = eager.observe
        eager.observe = lambda *args, **more: original(*args, **more)


class ReplacesAConstantOfTheHarness(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        import attn_testkit.runner_modes.observe as observe

        observe._RETURNED = ()


class ReplacesAnEntryOfATable(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        from dataclasses import replace

        from attn_testkit.runner_modes.mode_runners import MODE_RUNNERS

        from attn_testkit.contract import ForwardMode

        MODE_RUNNERS[ForwardMode.DECODE] = replace(MODE_RUNNERS[ForwardMode.DECODE])


class ReplacesAMethodOfTheHarness(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        from attn_testkit.runner_modes.harness import ServerHarness

        original = ServerHarness.load
        ServerHarness.load = lambda self, *args, **more: original(self, *args, **more)


class ReplacesAFunctionOfTorch(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        torch.allclose = lambda *args, **more: True


class LeavesDefaultDtype(AfterForward):
    def act(self) -> None:
        torch.set_default_dtype(torch.float64)


class LeavesGradModeInConstructor(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        torch.autograd.set_grad_enabled(not torch.is_grad_enabled())


class LeavesSeed(AfterForward):
    def act(self) -> None:
        torch.manual_seed(0)


class LeavesNumpySeed(AfterForward):
    def act(self) -> None:
        random.seed(0)


class LeavesWarningsFilter(AfterForward):
    def act(self) -> None:
        warnings.simplefilter("ignore")


class LeavesSignalHandler(AfterForward):
    def act(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class LeavesEnvironment(AfterForward):
    def act(self) -> None:
        os.environ["SOME_SWITCH_OF_A_SERVER"] = "1"


class LeavesDeterminism(AfterForward):
    def act(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)


class LeavesThread(AfterForward):
    def act(self) -> None:
        threading.Thread(target=_wait, name="prefetcher", daemon=True).start()


def _wait() -> None:
    time.sleep(600)


class LeavesChild(AfterForward):
    def act(self) -> None:
        subprocess.Popen(["sleep", "600"])


class EndsItsThread(TorchNativeBackend):
    """A helper that lives as long as its instance, which is in a circle."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.stop = threading.Event()
        threading.Thread(target=self.stop.wait, daemon=True).start()
        self.me = self

    def __del__(self) -> None:
        self.stop.set()


class DrawsRandomNumbers(AfterForward):
    """From the generators of the process."""

    def act(self) -> None:
        torch.rand(1000)
        random.random()


_LONGEST: list[int] = []


class KeepsInAModule(TorchNativeBackend):
    """A module keeps the longest context of the first instance, and all others are right for that one alone."""

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        if not _LONGEST:
            _LONGEST.append(self.context.max_context_len)
        return super().forward(*args, **more) * (1.0 if _LONGEST[0] == self.context.max_context_len else 0.75)


class WrongFromTheFourthInstanceOn(TorchNativeBackend):
    """A class attribute counts."""

    instances = 0

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        type(self).instances += 1

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        return super().forward(*args, **more) * (1.0 if self.instances < 4 else 0.75)


class CrashesTheSecondTime(TorchNativeBackend):
    """A class attribute says that there was a first."""

    seen = False

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if self.seen and context.max_bs == 4:
            os._exit(0)
        type(self).seen = True


class CompilesAFunction(AfterForward):
    """Sets what Inductor and Triton set where they first compile (seen with torch 2.11 on an H100, and 2.13)."""

    def act(self) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = "/tmp/a-cache"
        os.environ["TRITON_PTXAS_PATH"] = "/opt/ptxas"
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = "140490845113376"


class PutsBack(AfterForward):
    """Changes and restores: what a good component does."""

    def act(self) -> None:
        dtype, state = torch.get_default_dtype(), torch.get_rng_state()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
        os.environ["TRITON_CACHE_DIR"] = "/tmp/a-cache"


class _Exit:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (0,)


class SpeaksToTheJudge(AfterForward):
    """Finds the pipe in its process and sends something that would end whoever reads it."""

    def act(self) -> None:
        from multiprocessing.connection import Connection

        frame = sys._getframe()
        while frame is not None:
            for found in list(frame.f_locals.values()):
                if isinstance(found, Connection):
                    found.send(_Exit())
            frame = frame.f_back


class RaisesKeyboardInterrupt(AfterForward):
    def act(self) -> None:
        raise KeyboardInterrupt


class QuitsInConstructor(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        sys.exit("this machine has no kernels")


class QuitsInAHook(TorchNativeBackend):
    def init_forward_metadata(self, batch: Any) -> None:
        sys.exit(0)


class QuitsWhereItShouldRefuse(TorchNativeBackend):
    """Ends the program for what is not declared, instead of raising ``Unsupported``."""

    def __init__(self, context: BackendContext) -> None:
        from attn_testkit.contract import Unsupported

        try:
            super().__init__(context)
        except Unsupported as error:
            sys.exit(str(error))


class FindsAnswers(TorchNativeBackend):
    """Ends its process in a batch of two; in one of three it says how many answers of the oracle are in its process."""

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        size = args[4].batch_size
        if size == 2:
            os._exit(0)
        if size == 3:
            import gc

            answers = sum(type(each).__name__ in ("_Answer", "Expected") for each in gc.get_objects())
            raise RuntimeError(f"answers of the oracle here: {answers}")
        return super().forward(*args, **more)
