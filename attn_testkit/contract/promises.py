"""Promises of a backend that each add a check, and its needs, of which a server may not meet all."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from .declared import Declared
from .kv_pools import KV_DTYPES

__all__ = ["Needs", "Promises"]


@dataclass(frozen=True)
class Promises(Declared):
    """Promises of a backend, each of which adds a check: ``Promises(deterministic=True)``."""

    deterministic: bool = False
    """True: the same batch gives the same bits each time (``repeatable``). With an indexer, each row also selects the
    same keys each time, those of equal scores included; their order in a row of ``select`` may differ as far as
    ``forward`` gives the same bits. A backend whose top-k breaks ties in the order of arrival must not declare it. The
    top-k of FlashInfer (``deterministic``, ``tie_break``), SGLang and vLLM do so by default."""
    batch_invariant: bool = False
    """True: a request gives the same bits, and selects the same keys, whatever else is in the batch
    (``batch-invariant``)."""
    mode_invariant: bool = False
    """True: a row of decode or of a verified chain gives the same bits as a row of extend with the same keys
    (``mode-invariant``), as reinforcement learning needs it, where a prefill scores tokens that were decoded. It holds
    in eager mode and in replays, in each bucket and with padded requests. The kit compares with an eager extend."""

    def _check(self) -> None:
        self._check_flags()


@dataclass(frozen=True)
class Needs(Declared):
    """Needs of a backend: ``Needs(cpu_seq_lens=False)``. A backend that needs less can run in more servers."""

    cpu_seq_lens: bool = True
    """True: planning reads ``seq_lens_cpu``, ``seq_lens_sum`` and the ``*_cpu`` lists. False: they are None, or reading
    them is an error. Extend always has ``extend_seq_lens_cpu`` and ``extend_prefix_lens_cpu``, and draft-extend-v2 the
    first of them, because a server knows them without a host sync."""
    finite_page_tails: Set[str] = frozenset()
    """KV dtypes for which unused slots of a request's last page must hold finite numbers. Otherwise they hold NaN."""

    def _check(self) -> None:
        self._check_words("finite_page_tails", KV_DTYPES)
        self._check_flags()
