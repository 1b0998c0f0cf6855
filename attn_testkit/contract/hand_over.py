"""Handing memory over: requests that another instance has begun, such as a prefill server, and their memory there."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from .declared import Declared
from .index_pool import IndexPool
from .kv_group import KVGroup
from .kv_layouts import KV_LAYOUTS, OWN
from .state_pool import StatePool

__all__ = ["SENDER_RANKS", "HandOver", "HandedRequest", "Receives", "Sender", "heads_of_rank"]

SENDER_RANKS = ("same", "fewer", "more")
"""Ranks of a sender compared with those of the receiver: ``Receives.ranks``."""


@dataclass(frozen=True)
class Receives(Declared):
    """Instances from which a backend receives requests: ``Capabilities(receives=Receives(page_sizes={16}))``.

    Such a backend has ``AttentionBackend.receive``. Raises ``ValueError`` for a wrong spelling, and for sets that are
    empty.
    """

    page_sizes: Set[int]
    """Page sizes of the sender's KV pool, in slots."""
    kv_layouts: Set[str] = frozenset({"nhd"})
    """Layouts of the sender's KV pool, of those that ``KVPool`` lists; not ``custom``."""
    ranks: Set[str] = frozenset({"same"})
    """Tensor-parallel ranks of the sender: ``same`` number as here, ``fewer``, each of which has more heads, or
    ``more``. In all of them the ranks of MLA have the same rows."""
    shared_heads: bool = False
    """May a KV head, or a group of Mamba2, be on several ranks, here or at the sender, because a model has fewer of
    them than ranks?"""

    def _check(self) -> None:
        self._check_numbers("page_sizes", 1)
        self._check_words("kv_layouts", tuple(name for name in KV_LAYOUTS if name != OWN))
        self._check_words("ranks", SENDER_RANKS)
        for name in ("page_sizes", "kv_layouts", "ranks"):
            if not getattr(self, name):
                raise ValueError(f"Receives.{name} is empty; write one value or more, or leave receives out")
        self._check_flags()


def heads_of_rank(rank: int, ranks: int, heads: int) -> range:
    """Heads of the model, of ``heads`` in all, that a tensor-parallel rank has: consecutive ones, or one that
    ``ranks // heads`` consecutive ranks share. One of the two numbers divides the other."""
    if ranks > heads:
        return range(rank * heads // ranks, rank * heads // ranks + 1)
    return range(rank * heads // ranks, (rank + 1) * heads // ranks)


@dataclass(frozen=True, eq=False)
class Sender:
    """Memory of one tensor-parallel rank of the instance that hands requests over. It may only be read."""

    groups: tuple[KVGroup, ...]
    """KV pools and request tables, group by group as in ``BackendContext.groups``. Pages, layout and heads are the
    sender's. Empty if no layer has keys. All ranks have the same slots."""
    index_pool: IndexPool | None = None
    """Index keys in the slots of the first group, without an indexer None. Each rank has all of them."""
    state: StatePool | None = None
    """States of the rank's heads. In a window of the convolution the channels are q, k and v of these heads, in the
    order of ``StateLayer.channels``. None if no layer has a state."""


@dataclass(frozen=True)
class HandedRequest:
    """A request that is handed over. Tokens are counted from its first one."""

    row: int
    """Row of the receiver's request tables."""
    sender_row: int
    """Row of the sender's request tables."""
    starts: tuple[int, ...]
    """First token to hand over in each KV group, a multiple of the receiver's page size. The tokens before it are in
    the receiver's pool already, or no row sees them any more, and their slots may belong to others."""
    end: int
    """Number of tokens of which the sender has keys and values. The token ``end - 1`` may be inside a page, whose
    remaining slots may be overwritten."""
    state_slot: int = 0
    """Slot in the receiver's pool of states; 0 without states."""
    sender_state_slot: int = 0
    """Slot in the sender's pool of states."""


@dataclass(frozen=True, eq=False)
class HandOver:
    """The argument of ``AttentionBackend.receive``."""

    senders: tuple[Sender, ...]
    """The sender's tensor-parallel ranks, from rank 0 on."""
    requests: tuple[HandedRequest, ...]
    tp_rank: int
    """Tensor-parallel rank of the receiver."""
    tp_size: int
    """Number of the receiver's tensor-parallel ranks."""
    kv_heads: int
    """KV heads of the model; 1 for MLA. ``heads_of_rank`` says which of them a rank has."""
    state_key_heads: int = 0
    """Key heads of the model in layers that keep a state; 0 without such layers. Ranks may share groups of Mamba2, and
    each has all channels of B and C of its group. Value heads are never shared: of H on this rank a model has
    ``H * tp_size``."""
