"""The class of a rule, and sentences that rules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cuda_on_cpu.conditions import Call

NOT_PERMITTED = "CUDA would stop the capture with 'operation not permitted when stream is capturing'"
UNPINNED = (
    "torch would refuse with 'Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor"
    " is pinned'"
)
KEEP_ON_DEVICE = (
    "keep the value on the device, or compute it on the host before the capture and copy it into a buffer in place"
)
FIXED_SHAPE = (
    "use a form whose result shape does not depend on data (mask and torch.where, output_size=, nonzero_static)"
)
COPY_BEFORE = (
    "build it before the capture and copy_ into a persistent buffer before every replay; or use a device op (fill_,"
    " full, arange)"
)
NON_BLOCKING = "pass non_blocking=True, or do the copy before the capture"


@dataclass(frozen=True)
class Rule:
    """`ops` at the dispatcher that CUDA refuses in a capture when `applies`; without `ops`, function rules refer to it
    by name."""

    why: str
    cuda: str
    cure: str
    measured: tuple[str, ...]
    ops: str = ""
    applies: Callable[[Call], bool] = lambda call: True
    syncs: bool = True
    invalidates: bool = True
    eager: bool = False  # refused outside captures too
    says_whom: bool = False  # a refusal by it reports to the account of streams what the host waits for
    crosses: bool = False  # only where host and device memory meet
