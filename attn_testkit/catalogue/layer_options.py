"""Declared options of a layer: a sliding window, a soft cap of its logits, sinks. In target-verify also a tree that
branches, because its mask uses the same code paths (sglang #24617).
"""

from __future__ import annotations

from ..cases.case import Case
from ..cases.features.server.table import variant_of
from ..cases.rows import Verify
from ..cases.trees import Tree
from ..contract import Capabilities

_CAP = 1.5
"""Soft cap in units of the size of the data's logits."""
_TREE = Tree((0, 0, 1, 2))
"""Two branches of two nodes."""


def takes_window(declared: Capabilities, case: Case) -> bool:
    """True if a window is declared for the mode of ``case``, also together with its tree."""
    return case.mode in declared.windows.modes and (case.topk < 2 or declared.windows.in_trees)


def with_options(declared: Capabilities, case: Case, window: int) -> Case:
    """``case`` with all declared options. ``window``: keys before a query's own, if the case may have a window."""
    case = _with_branches(declared, case)
    return case.with_changes(
        window=window if takes_window(declared, case) else -1,
        logit_cap=_CAP if declared.options.logit_cap else 0.0,
        sinks=declared.options.sinks,
    )


def without_options(declared: Capabilities, case: Case) -> Case:
    """``case`` without options, as a counterpart of ``with_options``. It has the branching tree if the other case
    cannot have it because of its window."""
    return _branching(declared, case) if _windows_chains_alone(declared, case) else case


def _with_branches(declared: Capabilities, case: Case) -> Case:
    """``case`` with a branching tree, if it may keep its window."""
    return case if _windows_chains_alone(declared, case) else _branching(declared, case)


def _windows_chains_alone(declared: Capabilities, case: Case) -> bool:
    return case.mode in declared.windows.modes and not declared.windows.in_trees


def _branching(declared: Capabilities, case: Case) -> Case:
    """``case`` with a tree that branches instead of a short chain, if such trees are declared."""
    nodes = len(_TREE)
    supported = declared.bounds.max_topk >= _TREE.topk and declared.bounds.max_q_rows >= nodes >= case.width
    if case.tree is None or case.topk > 1 or not supported or variant_of(case).gives_none:
        return case
    return case.with_changes(rows=Verify(_TREE))
