"""Adapters whose attributes have names that a base class once had. No test module: pytest rewrites asserts of those."""

from __future__ import annotations

import torch

from attn_testkit.contract import BackendContext, KernelPlan
from attn_testkit.examples.minimal import MinimalBackend

__all__ = ["HasShortMethods", "KeepsShortNames"]

ONCE_TAKEN = ("_rows", "_pages", "_step", "_mask", "_stored", "_branches", "_draft_mask", "_steps_of_others")


class KeepsShortNames(MinimalBackend):
    """Has what it needs under the names that the base class once had."""

    def __init__(self, context: BackendContext) -> None:
        self._before = context.page_size
        super().__init__(context)
        for name in ONCE_TAKEN:
            setattr(self, name, (name, context.page_size))

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert all(getattr(self, name) == (name, plan.page_size) for name in ONCE_TAKEN)
        return super().run(q, kv, plan)


class HasShortMethods(MinimalBackend):
    """Likewise, as methods with other arguments, and as values of the class."""

    _step = 3
    _mask = "none"

    def _rows(self) -> int:
        return 1

    def _pages(self, first: int, last: int) -> int:
        return last - first

    @property
    def _stored(self) -> int:
        return self._pages(0, self._rows())

    def _branches(self) -> None:
        return None

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert self._stored == 1
        return super().run(q, kv, plan)
