"""Heads of a model on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract.head_layout import HEAD_LAYOUTS, HeadLayout, head_layout_of


@dataclass(frozen=True)
class Heads:
    """Head layout of one rank."""

    family: str
    """``mha``, ``gqa``, ``mqa`` or ``mla``."""
    q_heads: int
    kv_heads: int
    """A divisor of ``q_heads``: as many (mha), fewer (gqa), 1 (mqa, mla)."""

    @property
    def layout(self) -> HeadLayout:
        """Row of the table of head layouts. Raises ``KeyError`` for an unknown family."""
        return HEAD_LAYOUTS[self.family]

    @classmethod
    def of(cls, family: str, q_heads: int, kv_heads: int, *, values_in_keys: bool = False) -> Heads:
        """Heads of these numbers, from which their layout follows. Raises ``LookupError``."""
        return cls(head_layout_of(family, q_heads, kv_heads, values_in_keys=values_in_keys).name, q_heads, kv_heads)

    def __str__(self) -> str:
        ratio = self.q_heads // self.kv_heads
        return f"{self.family}{ratio}x{self.kv_heads}" if self.layout.is_grouped else f"{self.family}{self.q_heads}"
