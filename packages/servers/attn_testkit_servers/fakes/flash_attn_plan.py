"""Decisions of FlashAttention 3 on the host before it launches: splits of the keys, and the layout of its schedule.

Both of its entry points decide by their own arguments, and a captured graph keeps the decision of its capture. A replay
whose schedule was made for other splits has another layout, but the captured kernels read it in the layout of the
capture. The rules are those of vLLM's FlashAttention at 617264c1 (``hopper/flash_api.cpp``, ``heuristics.h``,
``tile_size.h``) for an H100 and for pages that are smaller than a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

SM_COUNT = 132
"""Streaming multiprocessors of an H100."""
_MOST_SPLITS = 128
_LARGEST_SPLIT_BATCH = 992
"""Most requests of a batch whose keys are split (``PREPARE_VARLEN_MAX_BATCHES_1CTA``)."""
_GOOD_ENOUGH = 0.85
"""The fraction of the best occupancy that is good enough: the fewest splits that reach it are chosen."""


@dataclass(frozen=True)
class SplitPlan:
    """Decisions about one launch."""

    requests: int
    splits: int
    """Most splits of a request. More than 1: a second kernel combines partial results."""
    reorders_heads: bool
    """True for causal and windowed layers, whose schedule says how many heads fit into the L2 cache."""
    rows_per_tile: int
    keys_per_tile: int

    @property
    def rounded(self) -> int:
        """Entries of a vector of the schedule: requests, rounded up to 4."""
        return -(-self.requests // 4) * 4

    @property
    def vectors(self) -> tuple[str, ...]:
        """Vectors of the schedule in their order; a counter of tiles follows the last one."""
        dynamic = self.splits > 1 and self.requests <= _LARGEST_SPLIT_BATCH
        return ("rows", *(("splits",) if dynamic else ()), *(("heads_in_l2",) if self.reorders_heads else ()))

    @property
    def size(self) -> int:
        """Entries of the schedule."""
        return self.rounded * len(self.vectors) + 1

    def start(self, vector: str) -> int:
        """The first entry of a vector."""
        return self.rounded * self.vectors.index(vector)


def split_plan(
    requests: int, max_seqlen_q: int, max_seqlen_k: int, heads: int, kv_heads: int, dim: int, itemsize: int,
    is_causal: bool, left: int, right: int, num_splits: int,
) -> SplitPlan:  # fmt: skip
    """Decide about a launch. ``left`` and ``right``: sides of the window, -1 without one. ``num_splits``: 0 for a
    heuristic, which uses the longest request.
    """
    left = -1 if left >= max_seqlen_k - 1 else left
    right = -1 if right >= max_seqlen_q - 1 else right
    if max_seqlen_q == 1 and left == right == -1 and not 64 < dim <= 128:
        is_causal = False
    right = 0 if is_causal else right
    is_causal = left < 0 and right == 0
    is_local = not is_causal and (left >= 0 or right >= 0)
    ratio = heads // kv_heads
    few_rows = dim in (64, 128) and not is_local and max_seqlen_q * ratio <= 64
    rows, keys = _tile(dim, itemsize, few_rows=few_rows, is_causal=is_causal, is_local=is_local)
    if num_splits <= 0:
        loaded = max_seqlen_k
        if is_local:
            right_side = max_seqlen_q - 1 if right < 0 else right
            left_side = max_seqlen_k - 1 if left < 0 else left
            loaded = max(0, min(max_seqlen_k, left_side + right_side + 1 + rows))
        num_splits = _splits_by_occupancy(kv_heads * -(-max_seqlen_q * ratio // rows), -(-loaded // keys))
    if requests > _LARGEST_SPLIT_BATCH:
        num_splits = 1
    return SplitPlan(requests, num_splits, is_causal or is_local, rows, keys)


def _tile(dim: int, itemsize: int, *, few_rows: bool, is_causal: bool, is_local: bool) -> tuple[int, int]:
    """Rows and keys of a tile on SM90, for pages that are smaller than it."""
    if itemsize == 1:
        if few_rows:
            return (64, 128) if dim <= 96 else (64, 96)
        by_dim = {64: (192, 128), 96: (128, 128), 128: (128, 192), 192: (128, 96), 256: (128, 64 if is_local else 128)}
    else:
        few = {64: (64, 192), 128: (64, 128)}
        if few_rows:
            return few[dim]
        by_dim = {
            64: (192, 128 if is_causal else 160), 96: (192, 128), 128: (128, 128), 192: (128, 96),
            256: (128, 64 if is_local else 80),
        }  # fmt: skip
    return next(tile for most, tile in by_dim.items() if dim <= most)


def _splits_by_occupancy(row_tiles: int, key_tiles: int) -> int:
    """The fewest splits that occupy the GPU nearly as well as the best number does, for one request of these tiles."""
    if row_tiles >= 0.8 * SM_COUNT or key_tiles <= 4:
        return 1
    waves = [row_tiles * splits / SM_COUNT for splits in range(1, min(_MOST_SPLITS, SM_COUNT, key_tiles) + 1)]
    occupied = [wave / -(-wave // 1) for wave in waves]
    return next(number for number, each in enumerate(occupied, 1) if each >= _GOOD_ENOUGH * max(occupied))
