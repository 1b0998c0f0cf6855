"""Reading the messages of a worker: plain data of a few kinds, and no code.

A worker runs somebody's backend, and a pickle can name any function. The judge reads only pickles that build the
messages and their contents.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

_ALLOWED = {
    "attn_testkit.checks.lossless": {"TokenAttention", "GeneratedTokens"},
    "attn_testkit.checks.observation": {"Copies"},
    "attn_testkit.contract.merging": {"LogSumExp"},
    "attn_testkit.contract.modes": {"ForwardMode"},
    "attn_testkit.contract.requires": {"Requires"},
    "attn_testkit.results.finding": {"Finding"},
    "attn_testkit.runner_modes.messages": {"Described", "RunRecord", "StepRecord"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
}
"""Module -> the names in it that a message may be built from, in addition to what an author declares."""
_CONTRACT = "attn_testkit.contract."


class Unreadable(Exception):
    """A worker sent something that is not a message."""


def _is_declared(module: str, name: str) -> bool:
    """True for a record of ``Capabilities``."""
    if not module.startswith(_CONTRACT) or module not in sys.modules:
        return False
    from ...contract.declared import Declared  # with torch, which the front end reads messages without

    found = vars(sys.modules[module]).get(name)
    return isinstance(found, type) and issubclass(found, Declared)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()) and not _is_declared(module, name):
            raise Unreadable(f"it sent {module}.{name}, which is not allowed in a message")
        return super().find_class(module, name)


def read(data: bytes) -> Any:
    """The message in ``data``. Raises ``Unreadable`` for anything else."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except Unreadable:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise Unreadable(f"it sent {len(data)} bytes that are not a message: {reason}") from error
