"""``-k``: expressions of words, ``and``, ``or``, ``not`` and parentheses, with pytest's meaning and without pytest."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ..registry import UsageError

Matches = Callable[[str], bool]

_TOKEN = re.compile(r"\s*(?P<token>[()]|[\w:+\-.\[\]\\/,@^*]+)")


def keyword(text: str) -> Matches:
    """Compile an expression to a function of a name. A word matches a name that contains it, whatever its case.

    Raises ``UsageError`` with the column if the text is not an expression.
    """
    parser = _Parser(text)
    parser.tokens = parser.split()
    found = parser.either()
    if parser.place < len(parser.tokens):
        raise parser.error("the end, 'and' or 'or'")
    return found


@dataclass
class _Parser:
    text: str
    tokens: list[tuple[str, int]] = field(default_factory=list)
    """Tokens with their columns, from 1."""
    place: int = 0

    def split(self) -> list[tuple[str, int]]:
        """Split the text into tokens."""
        found, end = [], 0
        while self.text[end:].strip():
            match = _TOKEN.match(self.text, end)
            if match is None:
                rest = self.text[end:].lstrip()
                column = len(self.text) - len(rest) + 1
                raise UsageError(f"-k {self.text!r}: unexpected {rest[0]!r} at column {column}")
            found.append((match["token"], match.start("token") + 1))
            end = match.end()
        return found

    def error(self, expected: str) -> UsageError:
        """Make an error about the present token."""
        if self.place >= len(self.tokens):
            return UsageError(f"-k {self.text!r}: expected {expected}, got the end")
        token, column = self.tokens[self.place]
        return UsageError(f"-k {self.text!r}: expected {expected}, got {token!r} at column {column}")

    def takes(self, word: str) -> bool:
        """Consume the next token if it is this word."""
        found = self.place < len(self.tokens) and self.tokens[self.place][0] == word
        self.place += found
        return found

    def either(self) -> Matches:
        """Read ``A or B``."""
        parts = [self.both()]
        while self.takes("or"):
            parts.append(self.both())
        return lambda name: any(part(name) for part in parts)

    def both(self) -> Matches:
        """Read ``A and B``, which binds tighter than ``or``."""
        parts = [self.one()]
        while self.takes("and"):
            parts.append(self.one())
        return lambda name: all(part(name) for part in parts)

    def one(self) -> Matches:
        """Read a word, ``not A`` or ``(A)``."""
        if self.takes("not"):
            negated = self.one()
            return lambda name: not negated(name)
        if self.takes("("):
            inner = self.either()
            if not self.takes(")"):
                raise self.error("')', 'and' or 'or'")
            return inner
        if self.place >= len(self.tokens) or self.tokens[self.place][0] in ("and", "or", ")"):
            raise self.error("a word, 'not' or '('")
        word = self.tokens[self.place][0].lower()
        self.place += 1
        return lambda name: word in name.lower()
