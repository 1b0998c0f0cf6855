"""Watched classes of a server whose layers keep a state."""

from __future__ import annotations

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit_servers.record import watch


@watch
class LiveStates(TorchNativeStateBackend):
    """As its parent, and asks for lengths on the host."""

    capabilities = TorchNativeStateBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})
