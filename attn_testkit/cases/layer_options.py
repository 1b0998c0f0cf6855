"""Options of a layer, as far as they are claimed: a sliding window, a soft cap of its logits, sinks."""

from __future__ import annotations

from dataclasses import replace

from ..contract import Capabilities
from .case import Case

__all__ = ["takes_window", "with_options"]

_CAP = 1.5
"""Of the size of the logits that the data give."""


def takes_window(claims: Capabilities, case: Case) -> bool:
    """Whether a window is claimed for the mode of ``case``, and beside its tree."""
    return case.mode in claims.sliding_window and (case.topk < 2 or claims.window_in_trees)


def with_options(claims: Capabilities, case: Case, window: int) -> Case:
    """``case`` with all of them that are claimed. ``window``: keys before a query's own, where one is taken."""
    return replace(
        case,
        window=window if takes_window(claims, case) else -1,
        logit_cap=_CAP if claims.logit_cap else 0.0,
        sinks=claims.sinks,
    )
