"""Healthy controls that receive memory from another instance."""

from __future__ import annotations

from collections.abc import Iterator

from attn_testkit.contract import AttentionLayer, HandOver

from .catalogue import control
from .with_handed import HandedGroups, HandedIndices, HandedParent, HandedStates


@control()
class BlocksOfKeys(HandedParent):
    """Blocks of K and V are copied as wholes, and overwrite the rest of a last page, as connectors of vLLM and SGLang
    do (the parent of faults of keys)."""


@control()
class BlocksOfGroups(HandedGroups):
    """Each KV group has blocks of its own (the parent of faults of groups)."""


@control()
class BlocksAndIndexKeys(HandedIndices):
    """Index keys and their scales arrive token by token (the parent of faults of index keys)."""


@control()
class WindowsAndStates(HandedStates):
    """Windows arrive part by part, and states by heads (the parent of faults of states)."""


@control()
class LastCopyOfSharedGroups(HandedStates):
    """A group of Mamba2 that ranks of the sender share comes from the last of them: vLLM #55306 lets any one rank write
    it."""

    def rank_with(self, head: int, total: int, ranks: int) -> int:
        return super().rank_with(head, total, ranks) + max(1, ranks // total) - 1


@control()
class LastCopyOfSharedHeads(HandedParent):
    """A head that ranks of the sender share comes from the last of them, as schedulers spread the load of transfers."""

    def heads(self, layer: AttentionLayer, handed: HandOver) -> Iterator[tuple[int, int, int]]:
        for here, rank, there in super().heads(layer, handed):
            yield here, rank + self.copies(handed) - 1, there
