"""Bounds of a backend: the largest steps that it supports, and sizes at which another kernel runs."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared
from .modes import ForwardMode
from .refusal import Refusal

__all__ = ["Bounds"]


@dataclass(frozen=True)
class Bounds(Declared):
    """Bounds of a backend, of which a larger number declares more: ``Bounds(max_q_rows=8, max_topk=1)``.

    Raises ``ValueError`` for numbers that are too small.
    """

    max_q_rows: int = 1
    """Most query rows of one request: N in target-verify and draft-extend-v2, S + 1 in draft-extend."""
    max_extend_tokens: int = 1 << 20
    """Most new tokens of one request in extend. The default means any number. A decode kernel that supports only a few
    rows declares how many."""
    max_topk: int = 0
    """Widest branching of a draft tree. 0: no target-verify. 1: chains only. K: trees whose nodes have up to K
    children."""
    max_draft_branches: int = 1
    """Most branches of one request in draft-decode. 1: chains only. It differs from ``max_topk``: verifying a tree
    needs a kernel with a mask, whereas draft-decode needs a page table per branch."""
    max_context_len: int = 1 << 20
    """Most tokens of one request, prefix and new tokens together. The default means any number."""
    kernel_changes_at: Set[int] = frozenset()
    """Batch sizes from which a different kernel runs, such as ``{8}`` for a kernel of up to 7 requests and another for
    more. The kit tries a batch of each size, and a batch with one request fewer."""
    kernel_changes_at_keys: Set[int] = frozenset()
    """Sums of the keys of all requests of a batch, this step's included, from which a different kernel runs. The kit
    tries a batch of each sum, and a batch with one key fewer."""

    _GUESSED = ("max_context_len",)

    def _check(self) -> None:
        for name in ("max_q_rows", "max_extend_tokens", "max_draft_branches", "max_context_len"):
            self._check_number(name, 1)
        self._check_number("max_topk", 0)
        self._check_numbers("kernel_changes_at", 2)
        self._check_numbers("kernel_changes_at_keys", 16)

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """Numbers of a context that are larger than declared."""
        for what, asked, most in (
            ("query rows per request", max([1] + [_rows(mode, context) for mode in context.modes]), self.max_q_rows),
            ("new tokens per request", context.max_extend_tokens, self.max_extend_tokens),
            ("topk", context.topk, self.max_topk),
            ("draft branches", context.draft_branches, self.max_draft_branches),
            ("context length", context.max_context_len, self.max_context_len),
        ):
            if asked > most:
                yield what, asked


def _rows(mode: ForwardMode, context: BackendContext) -> int:
    if not mode.is_speculative():
        return 1
    return context.speculative_num_steps + 1 if mode is ForwardMode.DRAFT_EXTEND else context.num_draft_tokens
