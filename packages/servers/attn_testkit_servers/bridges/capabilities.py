"""Capabilities of a server's backend: one per line, with the place in the server that documents it.

The kit tries what is declared and nothing else: a line that is too wide gives a false failure, a line that is too
narrow hides a real one. A test checks that each place exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_testkit.contract import AttentionBackend, Capabilities, ForwardMode

D, V, V1, V2, X, DD = (
    ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2,
    ForwardMode.EXTEND, ForwardMode.DRAFT_DECODE,
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One declared capability."""

    capability: str
    """An entry of ``Capabilities``, or a field of a record in it: ``server.takes_out``."""
    value: Any
    place: str
    """``file:Class.function`` under the server's package, where the capability can be read."""


@dataclass(frozen=True)
class BridgeCapabilities:
    """Everything about one name; each bridge adds how its server is set up for it."""

    registered: str
    """The name in the server's own registry."""
    lines: tuple[Line, ...]

    @property
    def capabilities(self) -> Capabilities:
        """All lines as one object."""
        whole: dict[str, Any] = {line.capability: line.value for line in self.lines if "." not in line.capability}
        in_records: dict[str, dict[str, Any]] = {}
        for line in self.lines:
            record, _, name = line.capability.partition(".")
            if name:
                in_records.setdefault(record, {})[name] = line.value
        parts: dict[str, Any] = {name: in_records.pop(name) for name in in_records.keys() - whole.keys()}
        return Capabilities(**whole, **parts).with_changes(**in_records)


def class_of(
    base: type[AttentionBackend], server: str, name: str, declared: BridgeCapabilities, kernels: str, **words: Any
) -> type[AttentionBackend]:
    """A class below ``base`` for a name of a bridge. ``kernels``: as ``AttentionBackend.kernels``; ``words``: further
    attributes.
    """
    words |= {
        "__doc__": f"{server}'s backend {declared.registered}, unchanged.",
        "__module__": base.__module__,
        "declared": declared,
        "capabilities": declared.capabilities,
        "kernels": kernels,
    }
    return type(f"{server}_{name}", (base,), words)
