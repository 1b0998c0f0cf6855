"""Functions that move data between host and device, and the errors for forbidden mixtures."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_on_cpu import private, rules
from cuda_on_cpu.errors import EmulationError
from cuda_on_cpu.memory import fill_storage
from cuda_on_cpu.session import Session
from cuda_on_cpu.sites import author_site
from cuda_on_cpu.tags import is_pinned, tag_device


def mixed_devices(session: Session, operation: str) -> EmulationError:
    """The error for an operation on device and host memory together."""
    return EmulationError(
        session.operation or operation,
        author_site(),
        "torch would refuse with 'Expected all tensors to be on the same device, but found at least two devices, cuda:0"
        " and cpu!'",
        "move the host tensor to the device first (before the capture)",
    )


def copy_across(
    session: Session, source: Tensor, dtype: torch.dtype | None, to_device: bool, non_blocking: bool
) -> Tensor:
    """A copy of `source` as `dtype` (None: its own) in new memory on the other side.

    Pinned if it goes to the host without blocking.

    Raises what `Session.refuse` raises if CUDA would not let the host wait for it.
    """
    if session.capture is None and not non_blocking and source.numel():
        session.refuse(rules.TO_DEVICE if to_device else rules.TO_HOST)
    session.touch(source)
    outer, session.creating = session.creating, False
    try:
        result: Tensor = private.without_modes(torch.empty_like, source, dtype=dtype, requires_grad=False)
        if to_device:
            adopt(session, result)
        elif non_blocking:  # CUDA allocates pinned memory for it
            fill_storage(result.untyped_storage(), session.policy.fill)
            session.pin(result)
        session.begins_copy(result, source, non_blocking)
        if non_blocking and not to_device:
            session.copies_to_host(result, lambda: result.copy_(source, non_blocking=True))
        else:
            result.copy_(source, non_blocking=non_blocking)
        session.touch(result, writes=True)
        if not non_blocking or not (is_pinned(source) or is_pinned(result)):
            session.host_waits()
        return result
    finally:
        session.creating = outer


def adopt(session: Session, tensor: Tensor) -> Tensor:
    """Turn new host memory into device memory. Inside a capture, it belongs to the graph's pool."""
    tag_device(tensor)
    if session.capture is not None and session.recording:
        session.capture.block(tensor, in_pool=True)
    session.allocates(tensor)
    return tensor
