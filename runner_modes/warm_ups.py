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
    Only each request's last row is compared, and not in layers whose state all dummy requests update.
    """
    if fill < 1 or case.mode not in _LAST_ROW_HAS_KEYS:
        return ()
    first, *others = ([out[case.width - 1 :: case.width].contiguous() for out in run] for run in runs)
    shared = _layers_of_one_state(case, len(first[0])) if others else frozenset()
    for number, other in enumerate(others, 2):
        for layer, (a, b) in enumerate(zip(first, other, strict=True)):
            if layer in shared:
                continue
            bits = BITS[a.itemsize]
            differs = int((a.view(bits) != b.view(bits)).sum())
            if differs:
                name = case.layers.name(layer)
                return (f"{label}, {name}: {differs} of {a.numel()} values differ in warm-up {number}",)
    return ()


def _layers_of_one_state(case: Case, requests: int) -> frozenset[int]:
    """Layers in which all dummy requests of a capture update the state of slot 0.

    Each continues what was there when the device ran it, and a device runs the programs of a launch in any order. The
    programs of more than a hundred requests do not all run at once on an H200, and read different states each time. A
    verify that a commit takes back updates no slot.
    """
    state = case.state
    if state is None or state.padding != "write_zero" or requests < 2:
        return frozenset()
    if case.mode.is_target_verify() and state.rollback == "commit":
        return frozenset()
    return frozenset(case.places("recurrent"))
