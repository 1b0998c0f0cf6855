"""Draft-decode: the branches of a draft, which tokens see each other, and their columns of the request table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Draft:
    """K branches of S tokens per request. Its rows are those that go through the model, branch by branch: K * (S - 1).

    Raises ``ValueError`` for fewer than 1 branch or 2 steps, in which there is no forward.
    """

    branches: int
    """K."""
    steps: int
    """S: tokens of a branch. The last one is never fed back."""

    def __post_init__(self) -> None:
        if self.branches < 1 or self.steps < 2:
            raise ValueError(f"a draft has at least 1 branch and 2 steps, not {self.branches} and {self.steps}")

    def __len__(self) -> int:
        return self.branches * self.forwards

    @property
    def forwards(self) -> int:
        """Forwards of the model, each of K rows per request."""
        return self.steps - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Forward of each row, which is its distance from the prefix."""
        return tuple(range(self.forwards)) * self.branches

    @cached_property
    def visible(self) -> Bools:
        """[rows, rows] bool: a row sees itself and those before it in its own branch."""
        return np.kron(np.eye(self.branches, dtype=np.bool_), np.tri(self.forwards, dtype=np.bool_))

    def columns(self, prefix: int, page: int) -> Ints:
        """[K, S] int64: column of ``req_to_token`` of each branch's tokens. ``page``: its size."""
        first = prefix + np.arange(self.branches) * self._region(prefix, page)
        return first[:, None] + np.arange(self.steps)

    def copies(self, prefix: int, page: int) -> Ints:
        """[K - 1, n] int64: columns where all branches after the first one have the prefix's last n tokens again.

        These are the tokens in a page that the prefix fills in part, so that a branch can continue in its own page.
        """
        return self.columns(prefix, page)[1:, :1] - prefix % page + np.arange(prefix % page)

    def room(self, prefix: int, page: int) -> int:
        """Columns that a request needs, its prefix included."""
        # The last column of ``columns``, without its array: planning asks for thousands.
        return prefix + (self.branches - 1) * self._region(prefix, page) + self.steps

    def _region(self, prefix: int, page: int) -> int:
        return -(-(prefix % page + self.steps) // page) * page
