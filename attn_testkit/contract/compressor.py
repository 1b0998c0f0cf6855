"""Layers that compress keys, as a backend declares them."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared
from .refusal import Refusal, first_outside
from .row_format import ROPE_IN_VALUE

__all__ = ["Compressor", "refused_compressors"]


@dataclass(frozen=True)
class Compressor(Declared):
    """Layers that a backend compresses keys with: ``Capabilities(compressor=Compressor(ratios={128}))``.

    Such a backend is a ``CompressorBackend``, and its only head layout is ``compressor``. Raises ``ValueError`` for
    numbers below 2, and if nothing is declared.
    """

    ratios: Set[int] = frozenset()
    """Tokens r of a group, of layers in which a compressed row is made of one group (C128 of DeepSeek V4)."""
    overlapping_ratios: Set[int] = frozenset()
    """Tokens r of a group, of layers in which a compressed row is made of its group and the one before it (C4)."""

    rows: Set[str] = frozenset({"same"})
    """Compressed rows in memory: ``same`` for the model's dtype, or a row format of DeepSeek V4 (``ROPE_IN_VALUE``)."""

    def _check(self) -> None:
        self._check_words("rows", ("same", *sorted(ROPE_IN_VALUE)))
        if not self.rows:
            raise ValueError("Compressor.rows is empty; write {'same'}, or a row format of compressed rows")
        for name in ("ratios", "overlapping_ratios"):
            self._check_numbers(name, 2)
        if not self.ratios | self.overlapping_ratios:
            raise ValueError("Compressor declares no ratio; write Compressor(overlapping_ratios={4}, ratios={128})")


def refused_compressors(declared: Compressor | None, context: BackendContext) -> Iterator[Refusal]:
    """Layers of a context that compress keys, and that are not declared."""
    if context.compressor is None or declared is None:
        if context.compressor is not None or declared is not None:
            yield "layers that compress keys,", context.compressor is not None
        return
    yield from first_outside("compressed rows in", [context.compressor.pool.row_format], declared.rows)
    for overlaps, ratios in ((False, declared.ratios), (True, declared.overlapping_ratios)):
        found = (each.compress_ratio for each in context.compressor.layers if each.overlaps == overlaps)
        yield from first_outside(f"compression of {'overlapping ' * overlaps}groups of", found, ratios)
