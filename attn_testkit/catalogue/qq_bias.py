"""A bias among the rows of a step: prompts of different lengths, and drafts, with the declared layer options."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.dimensions.heads import other_heads
from ..cases.dimensions.rows import most_rows
from ..cases.rows import Extend, Verify, room_for
from ..cases.server_variants import usual_page
from ..cases.trees import Tree, chain
from ..contract import Capabilities, ForwardMode

_LENS = (130, 9, 1, 40)
_NEW = (7, 40, 3, 1)
_TREE = Tree((0, 0, 1, 1))
"""Two children of the root, and two of the first of them."""


def qq_bias_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Two of each declared mode, made of ``small``: without and with a window, a soft cap and sinks."""
    if small.mode not in declared.qq_bias or small.heads.layout.values_in_keys:
        return
    small = small.with_changes(
        heads=other_heads(declared), page_size=usual_page(declared), data="gauss", layout="shuffled",
        qq_bias="shared" if declared.shared_qq_bias else "own",
    )  # fmt: skip
    trees = False
    if small.mode is ForwardMode.EXTEND:
        new = tuple(min(count, most_rows(declared, small.mode)) for count in _NEW)
        small = small.of_requests(_LENS, padded=1, rows=Extend(new, room_for(new)))
    else:
        trees = declared.max_topk > 1 and declared.max_q_rows >= len(_TREE) and not declared.shared_qq_bias
        draft = _TREE if trees else chain(min(4, declared.max_q_rows))
        small = small.of_requests(_LENS, padded=1, rows=Verify(draft))
    yield small
    windowed = small.mode in declared.windows.modes and (declared.windows.in_trees or not trees)
    yield small.with_changes(
        window=max(5, declared.windows.smallest) if windowed else -1,
        logit_cap=1.5 if declared.logit_cap else 0.0,
        sinks=declared.sinks,
    )
