"""A module that segfaults where it is imported."""

import os
import signal

from attn_testkit.backends.torch_native import TorchNativeBackend

os.kill(os.getpid(), signal.SIGSEGV)


class Backend(TorchNativeBackend):
    pass
