"""Reading what a worker sends: plain data of a few kinds, and no code.

A worker runs somebody's backend, and a pickle can name any function. The judge reads only pickles that build the
messages and their contents.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

_ALLOWED = {
    "attn_testkit.checks.lossless": {"TokenAttention", "GeneratedTokens"},
    "attn_testkit.checks.observation": {"Copies"},
    "attn_testkit.contract.capabilities": {"Capabilities"},
    "attn_testkit.contract.merging": {"LogSumExp"},
    "attn_testkit.contract.modes": {"ForwardMode"},
    "attn_testkit.contract.requires": {"Requires"},
    "attn_testkit.contract.server_conventions": {"ServerConventions"},
    "attn_testkit.contract.spans": {"Spans"},
    "attn_testkit.contract.sparse": {"Indexer", "Sparse"},
    "attn_testkit.contract.state": {"State"},
    "attn_testkit.contract.cross_attention": {"CrossAttention"},
    "attn_testkit.contract.windows": {"Windows"},
    "attn_testkit.results.finding": {"Finding"},
    "attn_testkit.runner_modes.messages": {"Described", "RunRecord", "StepRecord"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
}
"""Module -> the names in it that a message may be built from."""


class Unreadable(Exception):
    """A worker sent something that is not a message."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise Unreadable(f"it sent {module}.{name}, which no message holds")
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
