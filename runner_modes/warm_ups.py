"""Comparison of the warm-ups of one plan: they are the same computation on the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_testkit.cases.case import Case
from attn_testkit.contract import ForwardMode
from attn_testkit.watches.pool_rows import BITS

_LAST_ROW_HAS_KEYS = frozenset(
    {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2}
)
"""Modes whose dummy requests have a key in their last row if ``seq_lens`` is 1 or more; earlier rows may have none."""


def uneven_warm_ups(case: Case, label: str, runs: Sequence[Sequence[torch.Tensor]], fill: int) -> tuple[str, ...]:
    """Name one place in which a later run has different bits from the first.

    ``runs``: attention outputs of all layers, [bs * width, Hq, Dv], per run. ``fill``: ``seq_lens`` of the dummy batch.
    Only each request's last row is compared.
    """
    if fill < 1 or case.mode not in _LAST_ROW_HAS_KEYS:
        return ()
    first, *others = ([out[case.width - 1 :: case.width].contiguous() for out in run] for run in runs)
    for number, other in enumerate(others, 2):
        for layer, (a, b) in enumerate(zip(first, other, strict=True)):
            bits = BITS[a.itemsize]
            differs = int((a.view(bits) != b.view(bits)).sum())
            if differs:
                name = case.layers.name(layer)
                return (f"{label}, {name}: {differs} of {a.numel()} values differ in warm-up {number}",)
    return ()
