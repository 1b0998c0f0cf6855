"""Rows that each request has in a step: one type per kind of step, which holds what only that kind has.

The forward mode follows from the type, so a tree in decode, chunks in target-verify or a draft without branches cannot
be built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..contract import ForwardMode
from .draft import Draft
from .trees import Tree, chain


def room_for(new: Sequence[int]) -> int:
    """The least ``Extend.room`` whose graph has enough rows for these requests and no others."""
    return -(-sum(new) // len(new))


def _check_rounds(rounds: int) -> None:
    if rounds < 0:
        raise ValueError(f"{rounds} rounds: a loop has 1 or more rounds, and 0 means no loop")


@dataclass(frozen=True)
class _Uniform:
    """Rows whose number is the same for every request, however many requests there are."""

    @property
    def new(self) -> tuple[int, ...]:
        """Tokens of each request, in the modes that list them; empty in the others."""
        return ()

    def counted(self, new: Sequence[int]) -> Self:
        """Rows with these tokens of each request, if the mode lists them."""
        return self


@dataclass(frozen=True)
class _Listed:
    """Rows whose number differs from request to request."""

    new: tuple[int, ...]
    """Draft-extend: accepted tokens of each request. Extend: new tokens of each."""

    def counted(self, new: Sequence[int]) -> Self:
        """Rows with these tokens of each request, if the mode lists them."""
        return replace(self, new=tuple(new))


@dataclass(frozen=True)
class Decode(_Uniform):
    """One row."""

    mode: ClassVar = ForwardMode.DECODE
    width: ClassVar = 1


@dataclass(frozen=True)
class Verify(_Uniform):
    """Target-verify: a row per node of a draft tree. Raises ``ValueError`` for fewer than 0 rounds."""

    mode: ClassVar = ForwardMode.TARGET_VERIFY
    tree: Tree
    rounds: int = 0
    """Rounds of a greedy-equivalence loop (``steps/verify_loop.py``), which run next to the steps."""

    def __post_init__(self) -> None:
        _check_rounds(self.rounds)

    @property
    def width(self) -> int:
        """Rows of a request in the graph."""
        return len(self.tree)


@dataclass(frozen=True)
class Drafted(_Uniform):
    """Draft-decode: the branches of a draft. Raises ``ValueError`` for fewer than 0 rounds."""

    mode: ClassVar = ForwardMode.DRAFT_DECODE
    draft: Draft
    rounds: int = 0
    """Rounds of a greedy-equivalence loop (``steps/greedy_loop.py``), which run next to the steps."""
    with_prefix: bool = False
    """True if every request of every step has a prefix."""

    def __post_init__(self) -> None:
        _check_rounds(self.rounds)

    @property
    def width(self) -> int:
        """Rows of a request in the graph, all forwards together."""
        return len(self.draft)


@dataclass(frozen=True)
class Accepted(_Listed):
    """Draft-extend: accepted tokens of each request. Raises ``ValueError`` for a count outside 1 .. ``width``."""

    width: int
    """Rows of a request in the graph: S + 1, in v2 N."""
    v2: bool = False
    """True for draft-extend v2: each request has ``width`` rows, however many tokens it accepts."""

    def __post_init__(self) -> None:
        if not all(1 <= count <= self.width for count in self.new):
            raise ValueError(f"accepted counts {self.new}: expected one per request, each 1..{self.width}")

    @property
    def mode(self) -> ForwardMode:
        """Draft-extend, or draft-extend v2."""
        return ForwardMode.DRAFT_EXTEND_V2 if self.v2 else ForwardMode.DRAFT_EXTEND


@dataclass(frozen=True)
class Extend(_Listed):
    """Extend: new tokens of each request. Raises ``ValueError`` for a batch without new tokens, and for fewer than 1
    chunk. A graph of B requests has B * ``room`` rows, which the requests of a step share. A request may have 0 tokens
    next to others that have some (``ServerConventions.takes_requests_without_rows``).
    """

    mode: ClassVar = ForwardMode.EXTEND
    room: int
    chunks: int = 1
    """Number of chunks in which the prompts of the case's own batch arrive; the own batch is the first chunk."""

    def __post_init__(self) -> None:
        if min(self.new, default=0) < 0 or (self.new and not any(self.new)):
            raise ValueError(f"new tokens {self.new} must be 0 or more per request, and at least one in total")
        if self.chunks < 1:
            raise ValueError(f"{self.chunks} chunks: prompts come in one or more")

    @property
    def width(self) -> int:
        """Rows of a request in the graph, on average."""
        return self.room


Rows = Decode | Verify | Accepted | Extend | Drafted


def changed_rows(rows: Rows, **parts: Any) -> dict[str, Rows]:
    """The field ``rows`` with other parts. Raises ``ValueError`` for a part that rows of this mode do not have."""
    unknown = parts.keys() - rows.__dataclass_fields__
    if unknown:
        raise ValueError(f"rows of {rows.mode} have no {' and no '.join(sorted(unknown))}")
    return {"rows": replace(rows, **parts)}


def minimal_rows(mode: ForwardMode) -> Rows:
    """The fewest rows of a mode, for one request."""
    match mode:
        case ForwardMode.DECODE:
            return Decode()
        case ForwardMode.TARGET_VERIFY:
            return Verify(chain(1))
        case ForwardMode.DRAFT_DECODE:
            return Drafted(Draft(1, 2))
        case ForwardMode.EXTEND:
            return Extend((1,), 1)
    return Accepted((1,), 1, v2=mode is ForwardMode.DRAFT_EXTEND_V2)


MIN_DRAFT_WIDTH = 2
"""The least width. Narrower batches belong to other modes: a chain of only a root is decode, and a draft of one step
has no forward."""


def with_draft_width(rows: Rows, width: int) -> Rows:
    """Rows of another ``Fields.draft_width``: a chain in target-verify. Raises ``ValueError`` in decode and extend."""
    match rows:
        case Verify():
            return Verify(chain(width))
        case Accepted():
            return replace(rows, width=width, new=tuple(min(count, width) for count in rows.new))
        case Drafted():
            return replace(rows, draft=Draft(rows.draft.branches, width))
    raise ValueError(f"rows of {rows.mode} have no width that a server changes")
