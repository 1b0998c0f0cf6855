"""The capability of prefill context parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared
from .refusal import Refusal
from .row_split import ROW_ORDERS

__all__ = ["PrefillRanks"]


@dataclass(frozen=True)
class PrefillRanks(Declared):
    """Prefill context parallelism that a backend supports: ``Capabilities(prefill_ranks=PrefillRanks({"zigzag"}))``.

    Raises ``ValueError`` for an unknown order, and without any.
    """

    orders: Set[str]
    """Ways in which rows may be dealt: of ``ROW_ORDERS``. Layers that keep a state support ``blocks`` only."""
    gathers: bool = False
    """True if the backend gathers the keys and values of the other ranks itself, with ``torch.distributed``.
    ``forward`` then gets ``k`` and ``v`` of its own rows only. False: ``forward`` gets those of all ranks."""

    def _check(self) -> None:
        self._check_words("orders", ROW_ORDERS)
        if not self.orders:
            raise ValueError("PrefillRanks.orders is empty; write PrefillRanks({'zigzag'}), or leave prefill_ranks out")
        self._check_flags()


def refused_rows(declared: PrefillRanks | None, context: BackendContext) -> Iterator[Refusal]:
    """Rows of a context that are dealt in a way that is not declared."""
    split = context.row_split
    if split is not None and (declared is None or split.order not in declared.orders):
        yield "prefill ranks with rows in the order", split.order
