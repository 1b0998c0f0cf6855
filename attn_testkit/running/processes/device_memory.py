"""A device that ran out of memory: did other processes fill it?"""

from __future__ import annotations

import re

import torch

from ...checks.failures import device_full
from ...results.texts import message_of

_ASKED = re.compile(r"Tried to allocate ([0-9.]+) ([KMG]iB)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def filled_by_others(error: BaseException) -> str:
    """The reason why this process did not cause ``error``; empty if it may have caused it.

    Several jobs of the kit, or other programs, may share a device. A process that would have stayed within half of the
    device, with what it asked for, would not have filled it by itself. The other half covers what torch does not count:
    the context, and memory of libraries.
    """
    if not device_full(error):
        return ""
    # The driver does not say what it was asked for.
    asked = _ASKED.search(message_of(error))
    wanted = float(asked[1]) * _UNITS[asked[2]] if asked else 0.0
    try:
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
    except (AssertionError, RuntimeError):
        # This torch has no CUDA, or the context is lost.
        return ""
    if own + wanted > total / 2:
        return ""
    held, whole, used = (f"{size / (1 << 30):.1f} GiB" for size in (own, total, total - free))
    return (
        f"the device is full: {used} of {whole} are used, {held} of them by this process. Use fewer --jobs, or a "
        "device that nothing else uses"
    )
