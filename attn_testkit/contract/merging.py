"""The log-sum-exp of an output, and KV splits, whose results are merged by it.

A server splits a request's keys if they are not stored in one place or not attended to by one kernel: a cached prefix
and the new tokens (chunked prefix, cascade), or the keys of each of R ranks (decode context parallelism). Each split
gives an output and its log-sum-exp. The weight of a split is the exponential of its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared, spelled
from .kv_split import KVSplit
from .modes import ForwardMode
from .refusal import Refusal

__all__ = ["LSE_BASES", "LSE_DTYPES", "LSE_LAYOUTS", "SPLIT_KINDS", "LogSumExp"]

LSE_BASES = ("e", "2")
LSE_LAYOUTS = ("[T, H]", "[H, T]")
LSE_DTYPES = ("fp32", "model")
SPLIT_KINDS = ("whole", "prefix", "pages", "tokens", "ranks")
"""Fields of ``LogSumExp``; each holds the modes in which a request's keys are split in one way."""


@dataclass(frozen=True)
class LogSumExp(Declared):
    """The log-sum-exp that ``forward_return_lse`` returns: ``Capabilities(lse=LogSumExp(base="2", whole={"decode"}))``.

    Raises ``ValueError`` for a wrong spelling, if no mode is named, and for KV splits in draft-decode.
    """

    base: str
    """Base of the logarithm: ``e``, or ``2`` as in FlashInfer and TRT-LLM."""
    layout: str = "[T, H]"
    """Layout: ``[T, H]`` is rows of q by query heads, and ``[H, T]`` is FlashAttention's layout."""
    dtype: str = "fp32"
    """Dtype: ``fp32``, or ``model`` for the output's. The tolerance follows from it: bfloat16 near 8 is off by up to
    0.03, and so are results merged by it."""
    whole: Set[ForwardMode] = frozenset()
    """Modes in which the log-sum-exp is returned for all keys of a request."""
    prefix: Set[ForwardMode] = frozenset()
    """Modes in which the backend can attend separately to the keys before the step and to the keys of the step."""
    pages: Set[ForwardMode] = frozenset()
    """Modes in which the backend can attend to the keys of one of R ranks, if a rank holds every R-th page of a
    request."""
    tokens: Set[ForwardMode] = frozenset()
    """Modes in which the backend can attend to the keys of one of R ranks, if a rank holds every R-th token, for any
    page size."""
    ranks: Set[ForwardMode] = frozenset()
    """Modes in which an instance can be one of R ranks that each have their own KV pool, request table and slots, for
    any number of consecutive tokens on a rank (decode context parallelism). ``BackendContext.dcp_rank`` says what such
    an instance is given."""
    merges: bool = False
    """True if the backend has a ``merge_state``."""

    def _check(self) -> None:
        for name, known in (("base", LSE_BASES), ("layout", LSE_LAYOUTS), ("dtype", LSE_DTYPES)):
            spelled(f"LogSumExp.{name}", getattr(self, name), known)
        self._check_modes(*SPLIT_KINDS)
        if not any(getattr(self, name) for name in SPLIT_KINDS):
            raise ValueError("LogSumExp names no mode; write whole={'decode'}, for instance")
        if ForwardMode.DRAFT_DECODE in self.prefix | self.pages | self.tokens | self.ranks:
            raise ValueError("LogSumExp: draft-decode has no KV splits; declare whole={'draft-decode'}")
        self._check_flags()

    def kinds(self, mode: ForwardMode) -> tuple[str, ...]:
        """Names of ``SPLIT_KINDS`` that are declared for a mode."""
        return tuple(name for name in SPLIT_KINDS if mode in getattr(self, name))


def refused_splits(lse: LogSumExp | None, context: BackendContext) -> Iterator[Refusal]:
    """KV splits of a context that are not declared."""

    def takes(part: KVSplit) -> bool:
        if lse is None:
            return False
        if part.own_pool:
            return context.modes <= lse.ranks
        if part.kind == "rank":
            by_token = lse.tokens if part.interleave == 1 else frozenset()
            by_page = lse.pages if part.interleave == context.page_size else frozenset()
            return context.modes <= by_token | by_page
        return context.modes <= (lse.whole if part.kind == "whole" else lse.prefix)

    if not all(map(takes, context.kv_splits)):
        yield "log-sum-exp of", ", ".join(map(str, context.kv_splits))
