"""Healthy controls that change state of the process and restore it, or use their own."""

from __future__ import annotations

import signal
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, Requires

from .catalogue import control, helper
from .dense import DenseBackend
from .parent import Metadata, PlannedBackend

_LEAN = PlannedBackend.capabilities.with_changes(
    heads={"families": {"gqa", "mqa"}, "head_dims": {64}},
    precision={"dtypes": {"bf16"}},
    options={"logit_cap": False, "sinks": False},
    windows=(),
)


@contextmanager
def _put_back() -> Iterator[None]:
    """Leave default dtype, grad mode, random state, warnings filters and one signal's handler as they were."""
    dtype, grad, state = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_rng_state()
    handler = signal.getsignal(signal.SIGUSR1)
    with warnings.catch_warnings():
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)
            torch.set_rng_state(state)
            signal.signal(signal.SIGUSR1, handler)


@control()
class ProcessStatePutBack(PlannedBackend):
    """Default dtype, grad mode, seed, warning filters and a signal handler change during a plan, and are restored."""

    capabilities = _LEAN.with_changes(eager={"decode"}, graph={"draft-extend"}, bounds={"max_topk": 0})

    def __init__(self, context: BackendContext) -> None:
        with _put_back():
            self.change_everything(context.dtype)
            super().__init__(context)

    def plan(self, batch: ForwardBatch) -> Metadata:
        with _put_back():
            self.change_everything(self.context.dtype)
            return super().plan(batch)

    @helper
    def change_everything(self, dtype: torch.dtype) -> None:
        """Change the state of the process as libraries do for a quiet, repeatable run."""
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        torch.manual_seed(17)
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@control()
class HelperThreadOfItsOwn(PlannedBackend):
    """A helper thread lives as long as its instance; plans draw from torch's own generator and seed nothing."""

    capabilities = _LEAN.with_changes(eager={"decode"}, graph={"decode"}, bounds={"max_topk": 0})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._ended = threading.Event()
        threading.Thread(target=_wait_for, args=(self._ended,), name="plan-prefetcher", daemon=True).start()
        weakref.finalize(self, self._ended.set)

    def plan(self, batch: ForwardBatch) -> Metadata:
        torch.rand(8)
        return super().plan(batch)


def _wait_for(ended: threading.Event) -> None:
    ended.wait()


@control()
class RandomNumbersOfItsOwn(PlannedBackend):
    """The backend's own generator fills the workspace with random numbers before every step."""

    capabilities = _LEAN.with_changes(eager={"draft-extend"}, graph={"decode"}, bounds={"max_topk": 0})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.generator = torch.Generator(context.device).manual_seed(17)

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.workspace.uniform_(generator=self.generator)
        return super().plan(batch)


_SCRATCH: dict[torch.device, list[torch.Tensor]] = {}


@control()
class ScratchOfTheProcess(PlannedBackend):
    """All instances keep their partial results in one workspace, from which a run reads only its own results."""

    capabilities = _LEAN

    def new_workspace(self, numbers: int) -> torch.Tensor:
        # One that is too small stays: graphs of other instances have its address.
        every = _SCRATCH.setdefault(self.context.device, [])
        if not every or every[-1].numel() < numbers:
            # A later instance may write it outside inference mode.
            with torch.inference_mode(False):
                every.append(super().new_workspace(numbers))
        return every[-1]


@control()
class TunedAtFirstCall(DenseBackend):
    """A kernel is tuned at its first call for a head dim, and its tuner waits for the device (Triton's own)."""

    capabilities = DenseBackend.capabilities.with_changes(
        heads={"families": {"gqa"}, "head_dims": {64, 128}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}},
        options={"sinks": False, "logit_cap": False},
        windows=(),
        requires=Requires(packages=("triton>=3.6",)),
    )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        from .tuned_copy import tuned_copy

        return tuned_copy(super().forward(q, k, v, layer, batch, save_kv_cache), layer.v_head_dim)


@control()
class RowsOfTickets(TunedAtFirstCall):
    """Programs draw row numbers from a counter, in any order, and each processes its row (persistent kernels)."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        from .rows_in_turn import copied_in_turn

        return copied_in_turn(DenseBackend.forward(self, q, k, v, layer, batch, save_kv_cache), own=True)
