"""Work on host tensors, which no function mode of torch needs to see."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

__all__ = ["host_work"]


def host_work() -> AbstractContextManager[object]:
    """Inside, operations of torch go past function modes: half the time that small ones take where a mode is entered.

    For host tensors alone. Where a mode stands for the device, it would not see an operation on the device either.
    """
    past_modes: AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return past_modes
