"""What a graph drive does beside replaying: the defaults judge, everything else asks why a replay is wrong."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DriveOptions"]


@dataclass(frozen=True)
class DriveOptions:
    """The settings of one graph drive. Diagnosis changes them on a fresh instance, one question a drive."""

    pattern: str | None = None
    """Numbers other than the case's (``cases/patterns.py``, ``cases/places.py``). Asks: which KV tokens did a row
    attend to, and whose result does it hold?"""
    poison_allocated: bool = True
    """Before every replay, poison what the backend allocated while a graph was captured: a graph must write such memory
    before it reads it. Without, asks: is the replay right when that memory keeps its numbers?"""
    watch_replaced: bool = False
    """Compare the backend's tensors before and after each plan for a replay. Asks: which of them did it replace?"""
    copy_into_replaced: bool = False
    """As ``watch_replaced``; and keep each replaced tensor alive, with its successor's numbers. Asks: is the replay
    right then, so that the graph still reads the old one?"""
    width_at_capture: bool = False
    """Say ``num_tokens_per_req`` at capture even to who claims ``takes_unset_width``. Asks: is the graph right then?"""
    contiguous_heads: bool = False
    """The heads of new k and v lie one behind the other even for who claims ``takes_strided_heads``. Asks: is the step
    right then?"""
    eager_steps: bool = True
    """Run eager steps on the same instance, before there are graphs and between replays. Without, asks: are replays
    right when they have the instance to themselves?"""
