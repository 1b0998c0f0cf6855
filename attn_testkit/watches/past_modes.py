"""Work of the kit's own that no function mode of torch needs to see."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

__all__ = ["past_modes"]


def past_modes() -> AbstractContextManager[object]:
    """Inside, operations of torch go past function modes: half the time that small ones take where a mode is entered.

    For host tensors, for views of device memory, and for what reads or writes device memory that is there. Where a mode
    stands for the device, memory that is made inside is no device memory: what comes of it must not leave the block but
    as a copy on the host. Nothing that a backend wrote may be called inside, nor anything that a capture records.
    """
    past: AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return past
