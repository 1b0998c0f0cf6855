"""Target-verify in servers without trees: lengths that count the new tokens, and chains without tree tensors."""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from ...rows import Verify
from ...trees import chain
from .variant import ServerVariant

_LENS = (9, 70, 1)


def _verify(declared: Capabilities, small: C) -> C:
    rows = min(4, declared.bounds.max_q_rows)
    return small.of_requests(_LENS, padded=1, rows=Verify(chain(rows)), data="gauss")


def _fits_with_new(declared: Capabilities, case: Fields) -> bool:
    return case.mode is ForwardMode.TARGET_VERIFY and set(declared.server.verify_lens) > {"all"}


def _fits_bare(declared: Capabilities, case: Fields) -> bool:
    return declared.server.takes_bare_chains and case.tree is not None and case.tree == chain(len(case.tree))


def _with_new(declared: Capabilities, small: C) -> Iterator[C]:
    if _fits_with_new(declared, small):
        yield _verify(declared, small).with_changes(variants=frozenset({"seq_lens_with_new"}))


def _bare(declared: Capabilities, small: C) -> Iterator[C]:
    if small.mode is ForwardMode.TARGET_VERIFY and declared.server.takes_bare_chains:
        yield _verify(declared, small).with_changes(variants=frozenset({"no_tree_tensors"}))


SEQ_LENS_WITH_NEW = ServerVariant(
    "seq_lens_with_new",
    "seq_lens of target-verify count the step's own tokens",
    "server.verify_lens",
    _with_new,
    _fits_with_new,
    says={"verify_lens": "all"},
    order=30,
    also=("withnew", "seq_lens include new tokens"),
)
NO_TREE_TENSORS = ServerVariant(
    "no_tree_tensors",
    "a chain is verified without a tree: no custom_mask and no retrieve_*",
    "server.takes_bare_chains",
    _bare,
    _fits_bare,
    gives_none=True,
    excludes={"branching trees": "the tree of a chain is known without its tensors"},
    order=40,
    also=("bare", "chain without tree tensors"),
)
