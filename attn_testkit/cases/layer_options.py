"""Options of a layer, as far as they are claimed: a sliding window, a soft cap of its logits, sinks. In verify also a
tree that branches: the masks of trees go through the same paths (sglang #24617).
"""

from __future__ import annotations

from dataclasses import replace

from ..contract import Capabilities
from .case import Case
from .rows import Verify
from .trees import Tree
from .ways import way_of

__all__ = ["takes_window", "with_options", "without_options"]

_CAP = 1.5
"""Of the size of the logits that the data give."""
_TREE = Tree((0, 0, 1, 2))
"""Two branches of two nodes."""


def takes_window(claims: Capabilities, case: Case) -> bool:
    """Whether a window is claimed for the mode of ``case``, and beside its tree."""
    return case.mode in claims.windows.modes and (case.topk < 2 or claims.windows.in_trees)


def with_options(claims: Capabilities, case: Case, window: int) -> Case:
    """``case`` with all of them that are claimed. ``window``: keys before a query's own, where one is taken."""
    case = _with_branches(claims, case)
    return replace(
        case,
        window=window if takes_window(claims, case) else -1,
        logit_cap=_CAP if claims.logit_cap else 0.0,
        sinks=claims.sinks,
    )


def without_options(claims: Capabilities, case: Case) -> Case:
    """``case`` as the plain twin of ``with_options``, which has the tree where a window keeps the other from it."""
    return _branching(claims, case) if _windows_chains_alone(claims, case) else case


def _with_branches(claims: Capabilities, case: Case) -> Case:
    """With a tree, where that takes no window away."""
    return case if _windows_chains_alone(claims, case) else _branching(claims, case)


def _windows_chains_alone(claims: Capabilities, case: Case) -> bool:
    return case.mode in claims.windows.modes and not claims.windows.in_trees


def _branching(claims: Capabilities, case: Case) -> Case:
    """With a tree that branches in place of a short chain, where that is claimed."""
    nodes = len(_TREE)
    claimed = claims.max_topk >= _TREE.topk and claims.max_q_rows >= nodes >= case.width
    if case.tree is None or case.topk > 1 or not claimed or way_of(case).gives_none:
        return case
    return replace(case, rows=Verify(_TREE))
