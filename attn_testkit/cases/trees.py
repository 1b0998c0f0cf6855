"""Draft trees: how they are built from parents, and everything that target-verify needs from them.

Host code on plain numpy arrays. Layouts and order follow the servers' tree kernels; ``tests/cases/test_trees.py`` holds
reference values of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tree:
    """A draft tree of N nodes. ``parents[j - 1]`` is the parent of node j; node 0 is the root.

    Raises ``ValueError`` if a parent's id is not smaller than its child's.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents, start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; a parent's id must be 0..{node - 1}")

    def __len__(self) -> int:
        return len(self.parents) + 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def visible(self) -> Bools:
        """[N, N] bool: row t sees column c if c is t itself or one of its ancestors."""
        n = len(self)
        seen = np.eye(n, dtype=np.bool_)
        for node, parent in enumerate(self.parents, start=1):
            seen[node] |= seen[parent]
        return seen

    @cached_property
    def links(self) -> tuple[Ints, Ints]:
        """([N], [N]) int64: first child and next sibling of each node as node ids, -1 for none; siblings ascend."""
        first, sibling = np.full(len(self), -1, np.int64), np.full(len(self), -1, np.int64)
        for node in range(len(self) - 1, 0, -1):
            parent = self.parents[node - 1]
            sibling[node], first[parent] = first[parent], node
        return first, sibling

    @property
    def depth(self) -> int:
        """S: the longest path below the root."""
        return max(self.depths)

    @property
    def topk(self) -> int:
        """K: the widest branching; 1 for a chain or a lone root."""
        return max([1, *(self.parents.count(p) for p in set(self.parents))])


def chain(n: int) -> Tree:
    """``n`` nodes, at least 1, each the child of the one before."""
    return Tree(tuple(range(n - 1)))


def random_tree(n: int, topk: int, depth: int, rng: np.random.Generator) -> Tree:
    """n nodes, at most ``topk`` children per node, at most ``depth`` levels below the root.

    Raises ``ValueError`` if no such tree exists.
    """
    room = sum(topk**level for level in range(depth + 1))
    if room < n:
        raise ValueError(f"no tree of {n} nodes has at most {topk} children per node and {depth} levels")
    parents: list[int] = []
    depths, children = [0], [0]
    for node in range(1, n):
        open_nodes = [p for p in range(node) if children[p] < topk and depths[p] < depth]
        parent = int(rng.choice(open_nodes))
        parents.append(parent)
        children[parent] += 1
        depths.append(depths[parent] + 1)
        children.append(0)
    return Tree(tuple(parents))


def from_scores(parent_list: Sequence[int], selected_index: Sequence[int], topk: int) -> Tree:
    """The tree that a top-k draft loop selects.

    ``selected_index`` [N - 1]: ascending positions in the flat candidate list (K of the first step, then K*K a step);
    ``parent_list``: position in that list of each kept beam. The parent of a node in group 0 is the root.
    """
    selected = list(selected_index)
    parents = []
    for index in selected:
        group = index // topk
        parents.append(0 if group == 0 else 1 + selected.index(parent_list[group]))
    return Tree(tuple(parents))


def full_mask(trees: Sequence[Tree], prefixes: Sequence[int]) -> Bools:
    """FULL_MASK: for each request [N, prefix + N] row-major, one after another, flat. Bool; prefixes in tokens.

    Raises ``ValueError`` unless there is one prefix for each tree.
    """
    blocks = [
        np.concatenate([np.ones((len(tree), prefix), np.bool_), tree.visible], axis=1).reshape(-1)
        for tree, prefix in zip(trees, prefixes, strict=True)
    ]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.bool_)


def qlen_only_mask(trees: Sequence[Tree]) -> Bools:
    """QLEN_ONLY: [bs, N, N] bool, row-major, flat."""
    return np.concatenate([tree.visible.reshape(-1) for tree in trees])


def bit_packed(trees: Sequence[Tree]) -> npt.NDArray[np.unsignedinteger]:
    """QLEN_ONLY_BITPACKING: [bs * N], one item per row, bit c set if node c is visible; uint8, uint16 or uint32 by N.

    Raises ``ValueError`` for trees of more than 32 nodes.
    """
    n = len(trees[0])
    if n > 32:
        raise ValueError(f"a bit-packed mask holds at most 32 nodes, this tree has {n}")
    dtype = np.uint8 if n <= 8 else np.uint16 if n <= 16 else np.uint32
    weights = np.uint64(1) << np.arange(n, dtype=np.uint64)
    return np.concatenate([(tree.visible * weights).sum(1).astype(dtype) for tree in trees])
