"""The log-sum-exp beside an output, and the parts of a request's keys whose results are merged with it.

A server attends a request's keys in parts where they are not in one place or not attended in one way: a cached prefix
apart from the new tokens (chunked prefix, cascade), or the keys of each of R ranks (decode context parallelism). Each
part gives an output and its log-sum-exp, and the weight of a part is the exponential of the latter.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Literal

import torch

from .modes import ForwardMode

__all__ = ["LSE_BASES", "LSE_DTYPES", "LSE_LAYOUTS", "PART_KINDS", "KVPart", "LogSumExp"]

LSE_BASES = ("e", "2")
LSE_LAYOUTS = ("[T, H]", "[H, T]")
LSE_DTYPES = ("fp32", "model")
PART_KINDS = ("whole", "prefix", "pages", "tokens")
"""Fields of ``LogSumExp`` that say in which modes a request's keys are attended so."""


@dataclass(frozen=True)
class LogSumExp:
    """What ``forward_return_lse`` gives: ``Capabilities(lse=LogSumExp(base="2", whole={"decode"}))``.

    Raises ``ValueError`` for a wrong spelling, without a mode, and for parts of a draft-decode's keys.
    """

    base: str
    """Of the logarithm: ``e``, or ``2`` as FlashInfer and TRT-LLM have it."""
    layout: str = "[T, H]"
    """Rows of q by query heads, ``[T, H]``, or ``[H, T]`` as FlashAttention has it."""
    dtype: str = "fp32"
    """``fp32``, or ``model``: that of the output. The limit follows: bfloat16 near 8 is off by up to 0.03, and merged
    results with it."""
    whole: Set[ForwardMode] = frozenset()
    """In which modes is it given for all keys of a request?"""
    prefix: Set[ForwardMode] = frozenset()
    """In which modes are the keys before the step attended apart from the step's own?"""
    pages: Set[ForwardMode] = frozenset()
    """In which modes is one of R ranks attended that has every R-th page of a request's keys?"""
    tokens: Set[ForwardMode] = frozenset()
    """The same for every R-th token, whatever the page size."""
    merges: bool = False
    """Has the backend a ``merge_state``?"""

    def __post_init__(self) -> None:
        for name, known in (("base", LSE_BASES), ("layout", LSE_LAYOUTS), ("dtype", LSE_DTYPES)):
            _spelled(name, getattr(self, name), known)
        for name in PART_KINDS:
            object.__setattr__(self, name, _modes(name, getattr(self, name)))
        if not any(getattr(self, name) for name in PART_KINDS):
            raise ValueError("LogSumExp names no mode; write whole={'decode'}, for instance")
        if ForwardMode.DRAFT_DECODE in self.prefix | self.pages | self.tokens:
            raise ValueError("LogSumExp: a draft-decode's keys are not attended in parts; claim whole={'draft-decode'}")
        if not isinstance(self.merges, bool):
            raise ValueError(f"LogSumExp.merges must be True or False, got {self.merges!r}")

    def kinds(self, mode: ForwardMode) -> tuple[str, ...]:
        """Those of ``PART_KINDS`` that are claimed in a mode."""
        return tuple(name for name in PART_KINDS if mode in getattr(self, name))


@dataclass(frozen=True)
class KVPart:
    """Which keys of each request a call attends. Keys are numbered in a request: 0, 1, ..., the step's own the last.

    In target-verify the draft's nodes are keys ``prefix .. prefix + N - 1``. What a row may see of a part is what it
    may see of all keys: causality, tree and window go by positions, and a window may leave a part without keys.
    ``holds``, ``lens`` and ``key`` are device work of shapes that follow no length.
    """

    kind: Literal["whole", "prefix", "new", "rank"] = "whole"
    """All keys; those before the step; the step's own; those of a rank."""
    rank: int = 0
    """0 .. ranks - 1."""
    ranks: int = 1
    interleave: int = 1
    """Keys that follow each other on a rank: 1, or the page size."""
    sinks: bool = True
    """Whether attention sinks count in this part: in one of the parts of a batch, and in no other."""

    def __str__(self) -> str:
        if self.kind != "rank":
            return {"whole": "all keys", "prefix": "the prefix", "new": "the new rows"}[self.kind]
        return f"rank {self.rank} of {self.ranks}"

    def holds(self, key: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
        """Bool: whether the part has key ``key`` of a request of ``prefix_lens`` keys before the step.

        The two are broadcast, whatever the kind.
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
        """How many keys the part has of ``kv_lens`` keys; ``prefix_lens`` is not negative."""
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
        """Which key of the request is the part's ``index``-th, from 0 on. The two are broadcast, whatever the kind."""
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
