"""A KV split: the keys of each request that a call attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["KVSplit"]


@dataclass(frozen=True)
class KVSplit:
    """A KV split: the keys of each request that a call attends to. Keys of a request are numbered from 0; the step's
    own come last.

    In target-verify the draft's nodes are keys ``prefix .. prefix + N - 1``. A row may see the same keys as without
    splits: causality, tree and window follow positions, and a window may leave a split without keys.
    ``holds``, ``lens``, ``key`` and ``index`` are device work whose shapes do not depend on lengths.
    """

    kind: Literal["whole", "prefix", "new", "rank"] = "whole"
    """All keys, keys before the step, the step's own keys, or the keys of a rank."""
    rank: int = 0
    """Number of the rank, 0 .. ranks - 1."""
    ranks: int = 1
    """R: number of ranks."""
    interleave: int = 1
    """I: consecutive keys on a rank: 1, the page size or, with its own pool, any number (vLLM's
    ``cp_kv_cache_interleave_size``)."""
    sinks: bool = True
    """True in the one split of a batch in which attention sinks count."""
    own_pool: bool = False
    """True if the rank is an instance with a separate KV pool and request table, as with decode context parallelism
    (``dcp_rank`` and ``dcp_world_size`` in vLLM and SGLang). False: all ranks read one pool."""

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

    def index(self, key: torch.Tensor) -> torch.Tensor:
        """Index, among the keys of the rank that has it, of key ``key`` of a request: on that rank the inverse of
        ``key``. With its own pool, a rank has the key in the slot ``req_to_token[request, index]``.
        """
        return key // (self.ranks * self.interleave) * self.interleave + key % self.interleave
