"""Layers that differ in head counts and head dims: their two alternating shapes, and the places of their heads.

Tensors that cover all layers (data, answers, limits, observations) have the case's shape. Each layer uses a part; the
rest is zero. Its query heads come first, and so do its dims. A KV head is repeated for all query heads of the layer
that use it. So attention on the whole equals attention on the parts bit for bit: zeros add nothing to a product, and
nothing as values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from ..contract import Capabilities, HeadShape


@dataclass(frozen=True)
class HeadMap:
    """Places of a layer's heads among those of its case."""

    layer: HeadShape
    case: HeadShape

    @cached_property
    def _kv_heads(self) -> list[int]:
        """First KV head of the case that contains each KV head of the layer."""
        each, of_case = (shape.num_qo_heads // shape.num_kv_heads for shape in (self.layer, self.case))
        return [head * each // of_case for head in range(self.layer.num_kv_heads)]

    @property
    def _times(self) -> int:
        """Number of KV heads of the case that contain one KV head of the layer."""
        return self.case.num_kv_heads * self.layer.num_qo_heads // self.case.num_qo_heads // self.layer.num_kv_heads

    def q_part(self, whole: torch.Tensor) -> torch.Tensor:
        """The layer's own part of queries or outputs [..., Hq, D]: a view."""
        return whole[..., : self.layer.num_qo_heads, : self.layer.head_dim]

    def kv_part(self, whole: torch.Tensor) -> torch.Tensor:
        """The layer's own part of keys or values [..., Hk, D]: a copy."""
        return whole[..., self._kv_heads, : self.layer.head_dim]

    def q_whole(self, part: torch.Tensor) -> torch.Tensor:
        """[..., Hq, D] of the case, from queries or outputs of the layer."""
        return self._in_zeros(part, self.case.num_qo_heads)

    def kv_whole(self, part: torch.Tensor) -> torch.Tensor:
        """[..., Hk, D] of the case, from keys or values of the layer."""
        return self._in_zeros(part.repeat_interleave(self._times, -2), self.case.num_kv_heads)

    def _in_zeros(self, part: torch.Tensor, heads: int) -> torch.Tensor:
        whole = part.new_zeros(*part.shape[:-2], heads, self.case.head_dim)
        whole[..., : part.shape[-2], : part.shape[-1]] = part
        return whole


def wrong_with_shapes(case: HeadShape, shapes: Sequence[HeadShape]) -> str:
    """Reason why layers of these shapes do not fit into the shape of ``case``; empty if they fit."""
    if case.num_qo_heads != max(shape.num_qo_heads for shape in shapes):
        return "the case has as many query heads as the layer with most of them"
    if case.head_dim != max(shape.head_dim for shape in shapes):
        return "the head dim of the case is that of the widest layer"
    ratios = [shape.num_qo_heads / shape.num_kv_heads for shape in shapes]
    least = case.num_qo_heads // case.num_kv_heads
    if least != min(ratios) or any(ratio % least for ratio in ratios):
        return "the case's query heads for a KV head are the fewest of a layer, and the others' a multiple of them"
    return ""


_SHAPE = r"\d+x\d+d\d+"
SHAPES_WORD = rf"(?:by({_SHAPE})\.({_SHAPE}))?"
"""Pattern after the word of the layers: two groups, which match nothing if all layers have the case's shape."""


def read_shapes(words: Sequence[str | None]) -> tuple[HeadShape, ...]:
    """Shapes of the groups of ``SHAPES_WORD``."""
    return tuple(HeadShape(*map(int, re.findall(r"\d+", word))) for word in words if word)


def shapes_word(shapes: Sequence[HeadShape]) -> str:
    """Word of a case id: ``by8x4d64.8x2d128``, query heads, KV heads and head dim."""
    each = (f"{shape.num_qo_heads}x{shape.num_kv_heads}d{shape.head_dim}" for shape in shapes)
    return f"by{'.'.join(each)}" if shapes else ""


_KV_HEADS = (4, 2, 1)


def declared_shapes(declared: Capabilities) -> list[tuple[HeadShape, HeadShape]]:
    """Pairs that layers may alternate between; empty if only one shape is declared.

    In the first pairs one layer has many KV heads and a narrow head dim, and the other has fewer KV heads and a wide
    head dim, like windowed and full layers. In later pairs the first layer has less of everything, like a draft's
    layers.
    """
    dims = sorted(declared.heads.head_dims)
    narrow, wide = dims[0], dims[min(1, len(dims) - 1)]
    # If one has the fewest query heads per KV head, and the most of both, the case has its heads.
    pairs = [
        (a, b)
        for a, b in product(_heads(declared), repeat=2)
        if _ratio(b) % _ratio(a) == 0 and a[0] >= b[0] and a[1] >= b[1]
    ]
    found = [(HeadShape(*a, narrow), HeadShape(*b, wide)) for a, b in _cheapest(p for p in pairs if p[0][0] == p[1][0])]
    found += [(HeadShape(*b, narrow), HeadShape(*a, wide)) for a, b in _cheapest(p for p in pairs if p[0][0] > p[1][0])]
    found = [pair for pair in found if pair[0] != pair[1]]
    # If there is only one pair, the other way round too.
    return found if len(found) != 1 else [found[0], found[0][::-1]]


_Heads = tuple[int, int]
"""Query heads and KV heads."""


def _ratio(heads: _Heads) -> int:
    return heads[0] // heads[1]


def _heads(declared: Capabilities) -> list[_Heads]:
    """Declared head layouts with few KV heads."""
    found = [(kv, kv) for kv in _KV_HEADS if "mha" in declared.heads.families]
    groups = sorted(declared.heads.gqa_ratios - {1})[:3]
    family = {1: "mqa"}
    return found + [
        (g * kv, kv) for g in groups for kv in _KV_HEADS if family.get(kv, "gqa") in declared.heads.families
    ]


def _cheapest(pairs: Iterable[tuple[_Heads, _Heads]]) -> list[tuple[_Heads, _Heads]]:
    """The cheapest pair, if there is one: both have several query heads for each of several KV heads, and their numbers
    of KV heads differ."""

    def cost(pair: tuple[_Heads, _Heads]) -> tuple[int, int, int]:
        minimal = sum((_ratio(heads) == 1) + (heads[1] == 1) for heads in pair)
        return minimal, pair[0][1] == pair[1][1], pair[0][0] + pair[1][0]

    return sorted(pairs, key=cost)[:1]
