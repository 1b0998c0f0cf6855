"""The log-sum-exp of an output, and KV splits, whose results are merged by it.

A server splits a request's keys if they do not lie in one place or are not attended by one kernel: a cached prefix and
the new tokens (chunked prefix, cascade), or the keys of each of R ranks (decode context parallelism). Each split gives
an output and its log-sum-exp. The weight of a split is the exponential of its log-sum-exp.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Literal

import torch

from .modes import ForwardMode

__all__ = ["LSE_BASES", "LSE_DTYPES", "LSE_LAYOUTS", "SPLIT_KINDS", "KVSplit", "LogSumExp"]

LSE_BASES = ("e", "2")
LSE_LAYOUTS = ("[T, H]", "[H, T]")
LSE_DTYPES = ("fp32", "model")
SPLIT_KINDS = ("whole", "prefix", "pages", "tokens")
"""Fields of ``LogSumExp`` that hold the modes in which a request's keys are split in this way."""


@dataclass(frozen=True)
class LogSumExp:
    """The log-sum-exp that ``forward_return_lse`` returns: ``Capabilities(lse=LogSumExp(base="2", whole={"decode"}))``.

    Raises ``ValueError`` for a wrong spelling, if no mode is named, and for KV splits in draft-decode.
    """

    base: str
    """Base of the logarithm: ``e``, or ``2`` as in FlashInfer and TRT-LLM."""
    layout: str = "[T, H]"
    """Layout: ``[T, H]`` is rows of q by query heads, ``[H, T]`` is that of FlashAttention."""
    dtype: str = "fp32"
    """Dtype: ``fp32``, or ``model`` for the output's. The tolerance follows from it: bfloat16 near 8 is off by up to
    0.03, and so are results merged by it."""
    whole: Set[ForwardMode] = frozenset()
    """Modes in which it is returned for all keys of a request."""
    prefix: Set[ForwardMode] = frozenset()
    """Modes in which the keys before the step and the step's own can be attended separately."""
    pages: Set[ForwardMode] = frozenset()
    """Modes in which the keys of one of R ranks can be attended that has every R-th page of a request."""
    tokens: Set[ForwardMode] = frozenset()
    """Modes in which the keys of one of R ranks can be attended that has every R-th token, for any page size."""
    merges: bool = False
    """True if the backend has a ``merge_state``."""

    def __post_init__(self) -> None:
        for name, known in (("base", LSE_BASES), ("layout", LSE_LAYOUTS), ("dtype", LSE_DTYPES)):
            _spelled(name, getattr(self, name), known)
        for name in SPLIT_KINDS:
            object.__setattr__(self, name, _modes(name, getattr(self, name)))
        if not any(getattr(self, name) for name in SPLIT_KINDS):
            raise ValueError("LogSumExp names no mode; write whole={'decode'}, for instance")
        if ForwardMode.DRAFT_DECODE in self.prefix | self.pages | self.tokens:
            raise ValueError("LogSumExp: draft-decode has no KV splits; declare whole={'draft-decode'}")
        if not isinstance(self.merges, bool):
            raise ValueError(f"LogSumExp.merges must be True or False, got {self.merges!r}")

    def kinds(self, mode: ForwardMode) -> tuple[str, ...]:
        """Names of ``SPLIT_KINDS`` that are declared for a mode."""
        return tuple(name for name in SPLIT_KINDS if mode in getattr(self, name))


@dataclass(frozen=True)
class KVSplit:
    """A KV split: the keys of each request that a call attends. Keys of a request are numbered from 0; the step's own
    come last.

    In target-verify the draft's nodes are keys ``prefix .. prefix + N - 1``. A row may see the same keys as without
    splits: causality, tree and window go by positions, and a window may leave a split without keys.
    ``holds``, ``lens`` and ``key`` are device work whose shapes do not depend on lengths.
    """

    kind: Literal["whole", "prefix", "new", "rank"] = "whole"
    """All keys; those before the step; the step's own; those of a rank."""
    rank: int = 0
    """Number of the rank, 0 .. ranks - 1."""
    ranks: int = 1
    """R: number of ranks."""
    interleave: int = 1
    """Consecutive keys on a rank: 1, or the page size."""
    sinks: bool = True
    """True in the one split of a batch in which attention sinks count."""

    def __str__(self) -> str:
        if self.kind != "rank":
            return {"whole": "all keys", "prefix": "the prefix", "new": "the new rows"}[self.kind]
        return f"rank {self.rank} of {self.ranks}"

    def holds(self, key: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
        """Bool: True if the split has key ``key`` of a request of ``prefix_lens`` keys before the step.

        The two are broadcast, for every kind.
        """
        known = (key >= 0) & (prefix_lens >= 0)
        if self.kind == "prefix":
            return known & (key < prefix_lens)
        if self.kind == "new":
            return known & (key >= prefix_lens)
        if self.kind == "rank":
            return known & (key // self.interleave % self.ranks == self.rank)
        return known

    def lens(self, kv_lens: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
        """Number of keys that the split has of ``kv_lens`` keys; ``prefix_lens`` is not negative."""
        if self.kind == "prefix":
            return prefix_lens
        if self.kind == "new":
            return kv_lens - prefix_lens
        if self.kind == "rank":
            turn = self.ranks * self.interleave
            rest = kv_lens % turn - self.rank * self.interleave
            held = rest * (rest > 0)
            return kv_lens // turn * self.interleave + held - (held - self.interleave) * (held > self.interleave)
        return kv_lens

    def key(self, index: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
        """Number, in its request, of the split's ``index``-th key, from 0. The two are broadcast, for every kind."""
        index = index + prefix_lens * 0
        if self.kind == "new":
            return prefix_lens + index
        if self.kind == "rank":
            return (index // self.interleave * self.ranks + self.rank) * self.interleave + index % self.interleave
        return index


def _modes(name: str, values: object) -> frozenset[ForwardMode]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"LogSumExp.{name} must be a set of modes, got {values!r}; write {{{values!r}}}")
    known = tuple(mode.value for mode in ForwardMode)
    return frozenset(ForwardMode(_spelled(name, getattr(value, "value", value), known)) for value in values)


def _spelled(name: str, value: object, known: tuple[str, ...]) -> str:
    if value in known:
        return str(value)
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown LogSumExp.{name} {value!r}{hint} (known: {', '.join(known)})")
