"""Work of the kit that function modes of torch need not see."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def past_modes() -> AbstractContextManager[object]:
    """Bypass function modes of torch inside the block, which halves the time of small operations.

    It is for host tensors, for views of device memory, and for reads and writes of existing device memory. If a mode
    emulates the device, memory that is allocated inside is not device memory: results may leave the block only as
    copies on the host. Neither code of a backend nor work that a capture records may run inside.
    """
    past: AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return past
