"""A module that hangs where it is imported."""

import time

from attn_testkit.backends.torch_native import TorchNativeBackend


def wait_for_a_licence_server() -> None:
    time.sleep(600)


wait_for_a_licence_server()


class Backend(TorchNativeBackend):
    pass
