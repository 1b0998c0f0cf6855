"""Modules of kernels ask the device at import, and build on it."""

import torch

from attn_testkit.examples import MinimalBackend

CAPABILITY = torch.cuda.get_device_capability()
SCRATCH = torch.zeros(16, device="cuda")


class Backend(MinimalBackend):
    pass
