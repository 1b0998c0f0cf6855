"""Prefill context parallelism: the new rows of each prompt are dealt among ranks, and each rank has all keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ROW_ORDERS", "RowSplit"]

ROW_ORDERS = ("zigzag", "roundrobin", "blocks")
"""Ways in which the rows of a prompt are dealt: ``RowSplit.order``."""


@dataclass(frozen=True)
class RowSplit:
    """The rows of each prompt that one of R ranks computes. Rows of a request are its new tokens in this step, from 0.

    ``holds``, ``lens`` and ``row`` are device work whose shapes do not depend on lengths; their arguments are
    broadcast. ``new_lens``: new tokens of a request on all ranks, ``seq_lens - extend_prefix_lens``.
    """

    order: str
    """``zigzag``: 2R blocks of consecutive rows, of which rank r has blocks r and 2R - 1 - r, so that all ranks have
    about as many keys to attend to. ``roundrobin``: row j is on rank j % R. ``blocks``: R blocks, of which rank r has
    block r. The first ``n % blocks`` blocks of n rows have one row more than the others (SGLang: ``in-seq-split``,
    ``round-robin-split``)."""
    rank: int
    """Number of the rank, 0 .. ranks - 1."""
    ranks: int
    """R: number of ranks."""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of the rank's blocks; empty with ``roundrobin``."""
        if self.order == "roundrobin":
            return ()
        return (self.rank, 2 * self.ranks - 1 - self.rank) if self.order == "zigzag" else (self.rank,)

    def start(self, block: int, new_lens: torch.Tensor) -> torch.Tensor:
        """First row of a block, which is also the end of the block before it."""
        count = self.ranks * len(self.blocks)
        return new_lens // count * block + (new_lens % count).clamp(max=block)

    def lens(self, new_lens: torch.Tensor) -> torch.Tensor:
        """Number of rows of the rank; 0 if a prompt has too few."""
        if not self.blocks:
            return (new_lens - self.rank + self.ranks - 1) // self.ranks
        sizes = [self.start(block + 1, new_lens) - self.start(block, new_lens) for block in self.blocks]
        return torch.stack(sizes).sum(0)

    def row(self, index: torch.Tensor, new_lens: torch.Tensor) -> torch.Tensor:
        """Row that is the ``index``-th one on the rank, from 0. Rows of a rank ascend."""
        if not self.blocks:
            return index * self.ranks + self.rank + new_lens * 0
        first, last = (self.start(block, new_lens) for block in (self.blocks[0], self.blocks[-1]))
        of_first = self.start(self.blocks[0] + 1, new_lens) - first
        return torch.where(index < of_first, first + index, last + index - of_first * (len(self.blocks) > 1))

    def rows(self, new: int) -> torch.Tensor:
        """[n] int64, on the host: the rank's rows in a prompt of ``new`` rows, ascending."""
        new_lens = torch.tensor(new)
        return self.row(torch.arange(int(self.lens(new_lens))), new_lens)

    def holds(self, row: torch.Tensor, new_lens: torch.Tensor) -> torch.Tensor:
        """Bool: True if the rank has row ``row``."""
        known = (row >= 0) & (row < new_lens)
        if not self.blocks:
            return known & (row % self.ranks == self.rank)
        inside = [
            (self.start(block, new_lens) <= row) & (row < self.start(block + 1, new_lens)) for block in self.blocks
        ]
        return known & (inside[0] | inside[-1])
