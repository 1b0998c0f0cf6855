"""Class L: state of the whole process that is changed and not restored, and then affects the next backend and the
caller. Each backend changes it in the constructor or in a plan, as libraries do, and computes right results.
"""

from __future__ import annotations

import signal
import threading
import warnings

import torch

from attn_testkit.contract import BackendContext, ForwardBatch

from .catalogue import fault
from .parent import Metadata, PlannedBackend


@fault("general", "leaves-process-alone", "dtype", modes="decode")
class DefaultDtypeLeftChanged(PlannedBackend):
    """The constructor makes the model's dtype torch's default, and does not restore float32."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        torch.set_default_dtype(context.dtype)


@fault("general", "leaves-process-alone", "grad", modes="decode")
class AutogradLeftOn(PlannedBackend):
    """A plan switches autograd on for itself, and the forward of the caller's model runs with it."""

    def plan(self, batch: ForwardBatch) -> Metadata:
        torch.set_grad_enabled(True)
        return super().plan(batch)


@fault("general", "leaves-process-alone", "random|seed|RNG", modes="decode")
class SeedOfTheProcessSet(PlannedBackend):
    """The constructor seeds torch's own generator to tune repeatably, and the caller's sampling continues from that
    seed."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        torch.manual_seed(20_261)


@fault("general", "leaves-process-alone", "warning", modes="decode")
class WarningsLeftSilenced(PlannedBackend):
    """The constructor silences the warnings of its dependencies, and with them all warnings of the process."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        warnings.simplefilter("ignore")


@fault("general", "leaves-process-alone", "thread", modes="decode")
class HelperThreadLeftRunning(PlannedBackend):
    """The constructor starts a thread that waits for plans to prefetch, and nothing ever ends it."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        threading.Thread(target=_wait_for_plans, name="plan-prefetcher", daemon=True).start()


def _wait_for_plans() -> None:
    threading.Event().wait()


@fault("general", "leaves-process-alone", "signal|SIGUSR1", modes="decode")
class SignalHandlerReplaced(PlannedBackend):
    """The constructor installs a signal handler for its own debugger and replaces the server's."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
