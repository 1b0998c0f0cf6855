"""``Compression``: groups of tokens of which a layer makes one row each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compression:
    """Groups of tokens; ``contract/compressor_layer.py`` says what is made of them."""

    ratio: int
    """r: tokens of a group."""
    overlaps: bool = False
    """A row is made of its group and the one before it."""

    rows: str = "same"
    """Row format of compressed rows, or ``same`` for the model's dtype."""

    def __str__(self) -> str:
        packed = "" if self.rows == "same" else f".{self.rows.replace('_', '')}"
        return f"ratio{self.ratio}{'overlap' * self.overlaps}{packed}"

    @property
    def window(self) -> int:
        """Tokens of which a row is made."""
        return self.ratio * (2 if self.overlaps else 1)

    def first_needed(self, tokens: int) -> int:
        """First position whose state some later row is made of, if a request has this number of tokens."""
        return max(0, (tokens // self.ratio + 1) * self.ratio - self.window)
