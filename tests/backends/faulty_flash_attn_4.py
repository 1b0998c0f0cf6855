"""Mistakes in calls of FlashAttention 4, each put into a copy of our adapter."""

from __future__ import annotations

from typing import Any

import torch

from attn_testkit.backends.flash_attn_4 import FlashAttn4Backend
from attn_testkit.contract import BackendContext, KernelPlan


class _Changed(FlashAttn4Backend):
    """Calls with other arguments."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        real = self._attend
        self._attend = lambda *args, **named: real(*args, **named | self.changed(named))

    def changed(self, named: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class WindowCountsTheRow(_Changed):
    """The window as vLLM counts it, with the row's own key among W."""

    def changed(self, named: dict[str, Any]) -> dict[str, Any]:
        before, after = named["window_size"]
        return {"window_size": (before if before is None else max(before - 1, 0), after)}


class OneSidedWindow(_Changed):
    """A window of both sides is given as one of the left side."""

    def changed(self, named: dict[str, Any]) -> dict[str, Any]:
        return {"window_size": (named["window_size"][0], None)}


class NoSoftCap(_Changed):
    """The soft cap of a layer is left out."""

    def changed(self, named: dict[str, Any]) -> dict[str, Any]:
        return {"softcap": 0.0}


class SinkOfTheFirstLayer(_Changed):
    """Each layer has the sinks of the first."""

    def changed(self, named: dict[str, Any]) -> dict[str, Any]:
        return {"learnable_sink": self.context.layers[0].sinks}


class LengthsOfTheCapture(FlashAttn4Backend):
    """A graph reads the lengths of its capture."""

    def run_return_lse(self, q: torch.Tensor, kv: Any, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.cuda.is_current_stream_capturing():
            kept = self.__dict__.setdefault("kept", {}).setdefault(len(plan.kv_lens), torch.ones_like(plan.kv_lens))
            object.__setattr__(plan.step, "kv_lens", kept)
        return super().run_return_lse(q, kv, plan)
